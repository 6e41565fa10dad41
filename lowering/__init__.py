"""Lowerings of tcport: a spec and a device profile in, candidate kernels out."""
