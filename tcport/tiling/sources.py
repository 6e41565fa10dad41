"""Digests of the source files that decide what is compiled: what was kept from other ones is stale."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_COMPILES = _PACKAGE / "tiling" / "compile_worker.py"


@functools.cache
def kernel_sources() -> str:
    """Digest of the sources of all of tcport's kernels."""
    return _digest((_PACKAGE / "kernels").glob("*.py"))


@functools.cache
def sources_of(module: str) -> str:
    """Digest of a kernel's file, of what compiles it, and of the files that these import, directly or not.

    Args:
        module: where the kernel's entry lies. Of its imports those are followed that lie beside it, or in tcport.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "unknown module"
    files: set[Path] = set()
    reading = [Path(spec.origin).resolve(), _COMPILES]
    while reading:
        path = reading.pop()
        if path not in files:
            files.add(path)
            reading += _imported(path)
    return _digest(files)


def _imported(path: Path) -> list[Path]:
    """The files that a file imports anywhere in it."""
    found = []
    for name in _imports(path):
        first, *rest = name.split(".")
        found.append(
            _PACKAGE.joinpath(*rest) if first == _PACKAGE.name else path.with_name(rest[-1] if rest else first)
        )
    return [file.resolve() for module in found if (file := module.with_suffix(".py")).is_file()]


def _imports(path: Path) -> set[str]:
    """What a file imports: modules, and names in them, which may be modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # what is no source, or was saved half written, is compared as it is
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | ({node.module} if node.module else set())
    return names


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted((path.name, path.read_bytes()) for path in files):
        digest.update(name.encode() + b"\0" + text)
    return digest.hexdigest()
