"""Where tcport keeps what is costly to make: one folder per user, set with ``TCPORT_CACHE_DIR``."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The folder for one kind of artefact; it may not exist yet, and may turn out not to be writable."""
    root = os.environ.get("TCPORT_CACHE_DIR")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tcport")
    return Path(root) / kind
