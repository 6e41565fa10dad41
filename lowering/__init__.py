"""Lowerings of tcport: a spec and a device profile in, candidate kernels out."""

from tcport.lowering import (  # noqa: F401  (importing them registers their rows)
    bundled,
    cpu,
    hopper,
    int4,
    kv_write,
    layers,
    merge_states,
    paged_attention,
    quantise,
)
