"""The identity of everything that decides what a compiled graph looks like.

Inductor keys its cache by the graph, its own config and the identity of custom passes; lowerings and kernels are not in
that key. Whatever tcport would do differently must therefore change the string made here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
import sys
import types
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
    """A digest of what a function does, as far as can be told from the function.

    It covers the file the function is written in (and so the helpers beside it), its own place in that file, its
    defaults and the values it closes over; its bytecode where there is no source file. Helpers of other modules are not
    covered: whoever registers the function names a version of them in ``params``.
    """
    return hashlib.sha256(json.dumps(_function_parts(function, set())).encode()).hexdigest()


def _function_parts(function: Any, seen: set[int]) -> list[str]:
    if isinstance(function, functools.partial):
        return ["partial", *_function_parts(function.func, seen), _stable(function.args), _stable(function.keywords)]
    if isinstance(function, types.MethodType):
        return [_stable(function.__self__), *_function_parts(function.__func__, seen)]
    code = getattr(function, "__code__", None)
    if code is None:  # a callable object: its class is its source, and its attributes are its parameters
        module = sys.modules.get(type(function).__module__)
        parts = [type(function).__qualname__, _file_digest(getattr(module, "__file__", None) or "")]
        return [*parts, _stable(getattr(function, "__dict__", function))]
    if id(function) in seen:
        return ["recursive"]
    seen.add(id(function))
    parts = [function.__qualname__, str(code.co_firstlineno), _file_digest(code.co_filename), *_code_parts(code)]
    parts.append(_stable((function.__defaults__, function.__kwdefaults__)))
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        parts += _function_parts(value, seen) if isinstance(value, types.FunctionType) else [_stable(value)]
    return parts


def _stable(value: Any) -> str:
    """``repr`` without addresses: those of a function inside a value differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _code_parts(code: types.CodeType) -> list[str]:
    """Bytecode, names and constants; of a nested function its own parts, as its object prints with an address."""
    nested = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    plain = [const for const in code.co_consts if not isinstance(const, types.CodeType)]
    return [
        code.co_code.hex(),
        _stable(code.co_names),
        _stable(plain),
        *(part for c in nested for part in _code_parts(c)),
    ]


def _file_digest(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return "no file"


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
