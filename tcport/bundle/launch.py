"""From a kernel launch with real arguments to the entry of a bundle that was compiled for it, and to the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tcport.bundle.manifest import C_TYPES, Bundle, Entry
from tcport.counting import count
from tcport.errors import BundleError
from tcport.kernels.offline import type_of


class BundleLauncher:
    """A launcher (see :data:`tcport.kernels.call.Launcher`) that runs what a bundle holds and compiles nothing."""

    def __init__(self, bundle: Bundle, entries: Sequence[Entry]) -> None:
        self._bundle = bundle
        self._entries = entries

    def __call__(self, kernel: Any) -> Mapping[Any, Callable[..., None]]:
        return _Launch(self._bundle, self._entries, kernel)  # type: ignore[return-value]


class _Launch:
    def __init__(self, bundle: Bundle, entries: Sequence[Entry], kernel: Any) -> None:
        self._bundle = bundle
        self._entries = entries
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            entry = find(self._entries, self._kernel, arguments)
            names = [name for name, kind in entry.signature.items() if kind != "constexpr"]
            kinds = [entry.signature[name] for name in names]
            values = [arguments[name] for name in names]
            device = next(v.device for v in arguments.values() if isinstance(v, torch.Tensor))
            sizes = tuple(int(size) for size in (*grid, 1, 1)[:3])
            launch = loaded(self._bundle, entry, device.index or 0)
            launch(sizes, *pack(values, kinds, entry.hidden), device)

        return run


def find(entries: Sequence[Entry], kernel: Any, arguments: Mapping[str, Any]) -> Entry:
    """The entry that was compiled for these arguments.

    Raises:
        BundleError: there is none; the message says what the nearest one was compiled for.
    """
    reasons = []
    for entry in entries:
        if entry.function != kernel.__name__:
            continue
        reason = mismatch(entry, kernel, arguments)
        if reason is None:
            return entry
        reasons.append(reason)
    why = min(reasons, key=len) if reasons else "it has no such kernel"
    raise BundleError(
        f"The bundle does not hold {kernel.__name__} for this call: {why}.", "Build it with this spec too."
    )


def mismatch(entry: Entry, kernel: Any, arguments: Mapping[str, Any]) -> str | None:
    """What was compiled into an entry and does not hold for a launch."""
    if list(entry.signature) != list(kernel.arg_names):
        return "its parameters are not those of the installed kernel"
    for name, kind in entry.signature.items():
        value = arguments[name]
        if kind == "constexpr":
            if value != entry.constants[name] or (value is None) != (entry.constants[name] is None):
                return f"{name} is {_plain(value)}, compiled in is {entry.constants[name]!r}"
        elif not _fits(value, kind):
            return f"{name} is {_plain(value)}, compiled for {kind}"
        elif name in entry.aligned and _address(value) % 16:
            return f"{name} is no multiple of 16"
    return None


def pack(values: Sequence[Any], kinds: Sequence[str], hidden: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments as plain numbers and their C types; the hidden ones are null pointers."""
    numbers = tuple(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values) + (0,) * hidden
    types = tuple(ctypes.c_void_p if kind.startswith("*") else C_TYPES[kind] for kind in kinds)
    return numbers, types + (ctypes.c_void_p,) * hidden


_functions: dict[tuple[str, str, str, int], Callable[..., None]] = {}


def loaded(bundle: Bundle, entry: Entry, device: int) -> Callable[..., None]:
    """What launches an entry on a device: ``launch(grid, numbers, c_types, torch_device)``. Loaded once.

    Raises:
        BundleError: the binary is corrupt, the driver refuses it, or the package that talks to the driver is absent.
    """
    key = (str(bundle.folder), entry.sha256, entry.symbol, device)
    if key not in _functions:
        data = bundle.binary(entry)
        with torch.cuda.device(device):
            _functions[key] = driver_for(bundle.target[0]).load(data, entry.symbol, entry.shared, entry.threads)
        count("bundle kernels loaded")
    return _functions[key]


def driver_for(backend: str) -> Any:
    """The module that loads and launches for a backend of Triton's."""
    if backend == "cuda":
        from tcport.bundle import cuda_driver

        return cuda_driver
    from tcport.bundle import hip_driver

    return hip_driver


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, (torch.Tensor, float)):
        return kind == type_of(value)
    # A kernel that takes 64 bits takes any number; one that takes 32 takes what 32 bits hold.
    return isinstance(value, int) and kind in ("i64", type_of(value))


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
