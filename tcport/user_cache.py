"""Where tcport keeps what is costly to make: one folder per user, set with ``TCPORT_CACHE_DIR``."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder(kind: str) -> Path:
    """The folder for one kind of artefact; it may not exist yet, and may turn out not to be writable."""
    return Path(os.environ.get("TCPORT_CACHE_DIR") or usual_root()) / kind


def usual_root() -> Path:
    """The user's cache folder where ``TCPORT_CACHE_DIR`` names no other."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tcport")


def kept(path: Path) -> dict[str, Any] | None:
    """What :func:`keep` stored there; None where nothing is, or what cannot be read or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def keep(path: Path, data: dict[str, Any]) -> None:
    """Store what can be made again, as JSON.

    Published by renaming, so that a reader never sees half a file and of processes that race the last wins. A folder
    that cannot be written costs the next process the time, and nothing else.
    """
    written = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            written = file.name
            json.dump(data, file)
        os.replace(written, path)
    except OSError:
        if written is not None:
            Path(written).unlink(missing_ok=True)  # a full disk is not to fill with beginnings
