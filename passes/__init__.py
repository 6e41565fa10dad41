"""Graph passes of tcport: one pass, one file."""

from tcport.passes import (  # noqa: F401  (importing them registers the passes)
    fuse_add_rms_norm,
    fuse_int4_matmul,
    fuse_norm_quantise,
    fuse_rope_write,
    fuse_silu_mul,
    fuse_silu_mul_quantise,
    merge_kv_write,
    repack_int4_matmul,
    select_tiles,
    share_metadata,
    split_shared_prefix,
    write_in_place,
)
