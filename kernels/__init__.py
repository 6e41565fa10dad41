"""Kernels of tcport: the reference that defines the operators, and everything that must agree with it."""
