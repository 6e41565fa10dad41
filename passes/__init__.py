"""Graph passes of tcport: one pass, one file."""

from tcport.passes import merge_kv_write, select_tiles, write_in_place  # noqa: F401  (importing them registers the passes)
