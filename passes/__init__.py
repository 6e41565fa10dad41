"""Graph passes of tcport: one pass, one file."""

from tcport.passes import select_tiles  # noqa: F401  (importing it registers the pass)
