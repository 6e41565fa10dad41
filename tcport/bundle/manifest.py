"""What lies in a bundle: ``manifest.json`` and one binary per compiled kernel, each known by its sha256.

An entry is one kernel of :mod:`tcport.kernels` compiled for one tile, with everything that was compiled into it: a
launch whose arguments differ in any of that is refused. Nothing is launched that was not checked.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcport.device.profile import DeviceProfile
from tcport.errors import BundleError

MANIFEST = "manifest.json"
ABI = 1
"""Version of the launch convention: order and types of parameters, hidden ones zero. Others are refused."""

C_TYPES = {
    "i1": ctypes.c_int8,
    "u1": ctypes.c_uint8,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
"""How a parameter that is no pointer is passed, by Triton's name of its type."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        kernel: the lowering's kernel it belongs to, such as ``"triton_decode"``.
        tile: block sizes, warps and stages of the tile it was compiled with.
        facts: the parts of the spec that choose it (see :func:`tcport.bundle.facts.facts_of`).
        function: name of the Triton function. symbol: its name in the binary.
        signature: type of each parameter in order, ``"constexpr"`` where the value is compiled in.
        constants: those values. aligned: parameters that must be multiples of 16.
        hidden: parameters behind those, which are zero.
        shared: bytes of shared memory. threads: threads of a CTA.
        file: the binary, beside the manifest. sha256: its digest.
    """

    kernel: str
    tile: Mapping[str, int]
    facts: Mapping[str, Any]
    function: str
    symbol: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    hidden: int
    shared: int
    threads: int
    file: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A read and checked manifest.

    Attributes:
        target: Triton's backend (``"cuda"``, ``"hip"``), architecture and warp width.
        sources: digest of the kernel sources it was compiled from.
        compiler: Triton's version. device: name of the device it was planned for.
        cpu: file and sha256 of the CPU's kernels, and the identity that the installed ones must have too.
    """

    folder: Path
    abi: int
    target: tuple[str, int | str, int]
    sources: str
    compiler: str
    device: str
    entries: tuple[Entry, ...]
    cpu: Mapping[str, str] | None = None

    def refusal(self, profile: DeviceProfile, target: tuple[str, int | str, int] | None, sources: str) -> str | None:
        """Why nothing of this bundle may run on a device; None when it may.

        Args:
            target: what kernels for the device are compiled for. sources: digest of the installed kernel sources.
        """
        if self.abi != ABI:
            return f"{self.folder} has launch convention {self.abi}, this tcport has {ABI}: build it again"
        if target is None or self.target != tuple(target):
            theirs = f"{target[0]} {target[1]}" if target else profile.arch or profile.vendor
            return f"{self.folder} was built for {self.target[0]} {self.target[1]}, the device is {theirs}"
        if self.sources != sources:
            return f"{self.folder} was built from other kernel sources than are installed: build it again"
        return None

    def digest(self) -> str:
        """Identity of what the bundle holds."""
        parts = [entry.sha256 for entry in self.entries] + ([self.cpu["sha256"]] if self.cpu else [])
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def binary(self, entry: Entry) -> bytes:
        """The compiled code of an entry.

        Raises:
            BundleError: the file is not there, or not what was built.
        """
        return _checked(self.folder / entry.file, entry.sha256)

    def cpu_library(self, identity: str) -> Path | None:
        """The file of the CPU's kernels, if the bundle has those of this identity.

        Raises:
            BundleError: the file is not there, or not what was built.
        """
        if self.cpu is None or self.cpu["identity"] != identity:
            return None
        path = self.folder / self.cpu["file"]
        _checked(path, self.cpu["sha256"])
        return path

    def faults(self) -> list[str]:
        """What is wrong with the files, one sentence each."""
        found = []
        for entry in self.entries:
            try:
                self.binary(entry)
            except BundleError as error:
                found.append(error.cause)
        try:
            self.cpu_library(self.cpu["identity"] if self.cpu else "")
        except BundleError as error:
            found.append(error.cause)
        return found


def read_bundle(folder: str | Path) -> Bundle:
    """Read a bundle's manifest; binaries are read and checked when they are first used.

    Raises:
        BundleError: there is no manifest, or it is not one.
    """
    folder = Path(folder).absolute()  # binaries are read later, when the process may work elsewhere
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        _require_kinds("the bundle", data, _BUNDLE)
        entries = tuple(_entry(entry) for entry in data.pop("entries"))
        if data.get("cpu") is not None:
            _require_kinds("cpu", data["cpu"], _CPU)
            _require_inside(data["cpu"]["file"])
        backend, arch, width = data.pop("target")
        return Bundle(folder=folder, target=(backend, arch, width), entries=entries, **data)
    except OSError as error:
        raise BundleError(
            f"{folder / MANIFEST} cannot be read: {error.strerror}.", "Name a folder that 'bundle build' wrote."
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise BundleError(f"{folder / MANIFEST} is no manifest: {error}.", "Build the bundle again.") from error


def write_bundle(bundle: Bundle, binaries: Mapping[str, bytes]) -> None:
    """Write binaries (by file name), and the manifest last, so that a bundle cut short has none."""
    bundle.folder.mkdir(parents=True, exist_ok=True)
    for name, data in binaries.items():
        (bundle.folder / name).write_bytes(data)
    plain = dataclasses.asdict(bundle)
    del plain["folder"]
    temporary = bundle.folder / f"{MANIFEST}.new"
    temporary.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    temporary.replace(bundle.folder / MANIFEST)


def _checked(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}.", "Build the bundle again.") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"{path} is corrupt: its sha256 is not the manifest's.", "Copy or build the bundle again.")
    return data


def _entry(data: Any) -> Entry:
    _require_kinds("an entry", data, _ENTRY)
    _require_kinds("a tile", data["tile"], _TILE)
    _require_inside(data["file"])
    _require_parameters(data)
    return Entry(**{**data, "aligned": tuple(data["aligned"])})


def _require_kinds(what: str, data: Any, kinds: Mapping[str, type]) -> None:
    """What was damaged shows here, and not where a kernel is chosen or launched."""
    if not isinstance(data, dict):
        raise TypeError(f"{what} is no JSON object")
    for name, kind in kinds.items():
        if type(data.get(name)) is not kind:
            raise TypeError(f"{what} has no {name} that is of type {kind.__name__}")


def _require_parameters(data: Mapping[str, Any]) -> None:
    """Every parameter has a type that a launch knows or a value, and sizes are ones that a launch can have."""
    for name, kind in data["signature"].items():
        if kind == "constexpr":
            if name not in data["constants"]:
                raise ValueError(f"{name} has neither a type nor a value")
        elif not isinstance(kind, str) or not (kind.startswith("*") or kind in C_TYPES):
            raise ValueError(f"{name} is of the type {kind!r}")
    unknown = [name for name in data["aligned"] if data["signature"].get(name, "constexpr") == "constexpr"]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is aligned and no parameter")
    sizes = {name: data[name] for name in ("hidden", "shared")} | {"threads": data["threads"] - 1}
    sizes |= {name: size - 1 for name, size in data["tile"].items()}
    wrong = [name for name, size in sizes.items() if not 0 <= size < 2**31]
    if wrong:
        raise ValueError(f"{wrong[0]} is out of range")


def _require_inside(file: str) -> None:
    if file in ("", ".", "..") or Path(file).name != file:
        raise ValueError(f"file {file!r} lies outside the bundle")


_BUNDLE: dict[str, type] = {"abi": int, "target": list, "sources": str, "compiler": str, "device": str, "entries": list}
_CPU: dict[str, type] = {"file": str, "sha256": str, "identity": str}
_TILE: dict[str, type] = {"block_m": int, "block_n": int, "num_warps": int, "num_stages": int}
_ENTRY: dict[str, type] = {
    "kernel": str,
    "tile": dict,
    "facts": dict,
    "function": str,
    "symbol": str,
    "signature": dict,
    "constants": dict,
    "aligned": list,
    "hidden": int,
    "shared": int,
    "threads": int,
    "file": str,
    "sha256": str,
}
"""Fields of a manifest and their types in JSON."""
