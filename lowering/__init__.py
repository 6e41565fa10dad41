"""Lowerings of tcport: a spec and a device profile in, candidate kernels out."""

from tcport.lowering import bundled, cpu, hopper, kv_write, layers, merge_states, paged_attention  # noqa: F401  (registers their rows)
