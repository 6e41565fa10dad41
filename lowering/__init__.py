"""Lowerings of tcport: a spec and a device profile in, candidate kernels out."""

from . import kv_write, merge_states, paged_attention  # noqa: F401  (importing them registers their rows)
