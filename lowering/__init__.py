"""Lowerings of tcport: a spec and a device profile in, candidate kernels out."""

from tcport.lowering import bundled, kv_write, merge_states, paged_attention  # noqa: F401  (importing them registers their rows)
