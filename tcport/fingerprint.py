"""The identity of everything that decides what a compiled graph looks like.

Inductor keys its cache by the graph, its own config and the identity of custom passes; lowerings and kernels are not in
that key. Whatever tcport would do differently must therefore change the string made here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("tcport", "tcport.adapter", "tcport.kernels", "tcport.lowering", "tcport.passes")


def fingerprint(parts: Iterable[Any] = ()) -> str:
    """A digest of tcport's sources, the torch and triton versions, and ``parts``.

    Args:
        parts: what else the compile depends on (options, device profile, third-party passes), each with a stable
            ``repr``.

    Returns:
        A hex string; equal in two processes exactly when sources, versions and parts are equal.
    """
    digest = hashlib.sha256(_sources().encode())
    digest.update(json.dumps([repr(part) for part in parts]).encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def _sources() -> str:
    """Digest of versions and of every source file; a process does not change its own sources, so it is taken once."""
    digest = hashlib.sha256(f"torch {torch.__version__} triton {triton_version()}".encode())
    for folder in _folders():
        for path in sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".toml", ".cpp", ".h"}):
            digest.update(f"{folder.name}/{path.relative_to(folder)}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def source_identity(function: Any) -> str:
    """A digest of a function's source, or of its bytecode where it was defined without a source file."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        text = repr((code.co_code, code.co_consts, code.co_names)) if code else repr(function)
    return hashlib.sha256(text.encode()).hexdigest()


def triton_version() -> str:
    """The installed Triton's version, read without importing it; ``"none"`` where it is absent."""
    from importlib import metadata

    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-xpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _folders() -> list[Path]:
    """The folders of tcport's packages, resolved so that a symlinked package is read once."""
    folders = {Path(path).resolve() for name in PACKAGES for path in importlib.import_module(name).__path__}
    return sorted(folder for folder in folders if not any(other in folder.parents for other in folders))
