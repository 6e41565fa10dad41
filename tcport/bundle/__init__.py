"""Precompiled kernels: built on any machine for a GPU that need not be there, loaded where no compiler works."""

from tcport.bundle.manifest import Bundle, Entry, read_bundle
from tcport.bundle.store import bundles, use_bundle

__all__ = ["Bundle", "Entry", "bundles", "read_bundle", "use_bundle"]
