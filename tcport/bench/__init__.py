"""Measurements to repeat on the machine at hand; each module prints a table: ``python -m tcport.bench.cpu``."""
