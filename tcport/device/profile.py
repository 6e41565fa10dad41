"""What tcport knows about one device: facts with units, each with its source, or with the reason it is unknown."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tcport.errors import ArgumentError

Vendor = Literal["nvidia", "amd", "intel", "cpu", "unknown"]


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """The facts of one visible device. ``None`` means unknown, and ``unknown`` says why.

    A vendor's zero is never a fact: sources report it as unknown. ``compute_unit`` stands for what the vendor calls
    SM (NVIDIA), CU or WGP (AMD), Xe-core (Intel), core (CPU). Sizes are bytes, rates are per second.

    Attributes:
        vendor: maker of the device; ``unknown`` when no runtime answered.
        device_type: torch's device type (``cuda``, ``xpu``, ``cpu``).
        arch: compiler target, such as ``sm_90``, ``gfx942``, ``xe2``, ``x86-64-v4``.
        shared_per_cta: shared memory (LDS, SLM) of one CTA without opt-in.
        shared_per_cta_optin: the most one CTA can have; this is the limit that kernels are checked against.
        registers_per_unit: 32-bit registers of one compute unit.
        matrix_flops: dense fp16/bf16 matrix multiply with fp32 accumulation, FLOP/s.
        mma_atom: widest matrix instruction family, such as ``mma.sync``, ``wgmma``, ``mfma``, ``wmma``, ``dpas``.
        async_copy: global-to-shared copy, such as ``none``, ``cp.async``, ``tma``, ``buffer_load_lds``.
        flags: capabilities known to be there (True) or not (False); an absent flag is unknown.
        basic_mode: None, or the reason why hardware-specific kernels are switched off.
        unknown: fact name -> why it is unknown, for every fact that is None.
        source: fact name -> what reported it.
        notes: what the environment does to this device (masks, overrides), one sentence each.
    """

    vendor: Vendor = "unknown"
    device_type: str = "cuda"
    arch: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    uuid: str | None = None
    driver_version: str | None = None
    runtime_version: str | None = None
    integrated: bool | None = None
    compute_units: int | None = None
    warp_width: int | None = None
    max_threads_per_cta: int | None = None
    max_threads_per_unit: int | None = None
    registers_per_unit: int | None = None
    max_registers_per_thread: int | None = None
    shared_per_cta: int | None = None
    shared_per_cta_optin: int | None = None
    shared_per_unit: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    clock_hz: float | None = None
    matrix_flops: float | None = None
    mma_atom: str | None = None
    async_copy: str | None = None
    flags: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    basic_mode: str | None = None
    unknown: Mapping[str, str] = dataclasses.field(default_factory=dict)
    source: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        reasons = {f: self.unknown.get(f) or "no source reported it" for f in FACTS if getattr(self, f) is None}
        for name, value in (("flags", self.flags), ("unknown", reasons), ("source", self.source)):
            object.__setattr__(self, name, MappingProxyType(dict(sorted(value.items()))))

    def has(self, flag: str) -> bool:
        """True when the capability is known to be there."""
        return self.flags.get(flag, False)

    def digest(self) -> str:
        """Hash of every fact a plan may depend on.

        Which card of several equal ones it is (uuid, bus id) and who reported a fact are left out, so that equal
        cards share compiled code.
        """
        facts = {k: v for k, v in self.to_dict().items() if k not in _IDENTITY}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def replace(self, **facts: Any) -> DeviceProfile:
        """A copy with some facts set; they are marked as set by the caller."""
        source = {**self.source, **dict.fromkeys(facts.keys() & set(FACTS), "set by the caller")}
        return dataclasses.replace(self, **{"source": source, **facts})

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the unknown facts' ``None``; ``from_dict`` takes it back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in fields.items() if v is not None}
        return {**plain, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceProfile:
        """Builds a profile from plain data.

        Raises:
            ArgumentError: on a field that does not exist or a value of the wrong type.
        """
        return cls(**{name: _checked(name, value) for name, value in data.items()})

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> DeviceProfile:
        return cls.from_dict(_parsed(json.loads, text, "JSON"))

    def to_toml(self) -> str:
        data = self.to_dict()
        lines = [f"{k} = {json.dumps(v)}" for k, v in data.items() if not isinstance(v, dict)]
        for table, entries in ((k, v) for k, v in data.items() if isinstance(v, dict) and v):
            lines += ["", f"[{table}]", *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in entries.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str) -> DeviceProfile:
        return cls.from_dict(_parsed(toml_loads, text, "TOML"))

    @classmethod
    def from_file(cls, path: str | Path) -> DeviceProfile:
        """Reads a profile from a ``.json`` or ``.toml`` file."""
        path = Path(path)
        read = cls.from_json if path.suffix == ".json" else cls.from_toml
        try:
            return read(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ArgumentError(
                f"The device profile {path} cannot be read: {why}.", "Give a readable .json or .toml file."
            ) from error

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Taken once: every eager call looks its choice up by the profile."""
        return hash(self.to_json())

    def __reduce__(self) -> tuple[Any, ...]:
        return (DeviceProfile.from_dict, (self.to_dict(),))


_MAPPINGS = ("flags", "unknown", "source")
_IDENTITY = frozenset({"pci_bus_id", "uuid", "unknown", "source", "notes"})
_ALL_FIELDS = {f.name: str(f.type) for f in dataclasses.fields(DeviceProfile)}

FACTS: tuple[str, ...] = tuple(
    name for name in _ALL_FIELDS if name not in (*_MAPPINGS, "vendor", "device_type", "basic_mode", "notes")
)
"""The names of the facts that may be unknown."""


def _checked(name: str, value: Any) -> Any:
    if name not in _ALL_FIELDS:
        raise ArgumentError(
            f"A device profile has no field {name!r}.", f"Its fields are {', '.join(sorted(_ALL_FIELDS))}."
        )
    declared = _ALL_FIELDS[name]
    if name in _MAPPINGS:
        ok, wanted = isinstance(value, Mapping), "a table"
    elif name == "notes":
        ok, wanted = isinstance(value, list | tuple), "a list of sentences"
        value = tuple(value) if ok else value
    elif declared.startswith("int"):
        ok, wanted = isinstance(value, int) and not isinstance(value, bool) and value > 0, "a positive integer"
    elif declared.startswith("float"):
        ok, wanted = isinstance(value, int | float) and not isinstance(value, bool) and value > 0, "a positive number"
        value = float(value) if ok else value
    elif declared.startswith("bool"):
        ok, wanted = isinstance(value, bool), "true or false"
    else:
        ok, wanted = isinstance(value, str), "a string"
    if not ok:
        raise ArgumentError(
            f"The device profile's {name} is {value!r}; it must be {wanted}.", "Leave it out where it is unknown."
        )
    return value


def _parsed(loads: Any, text: str, kind: str) -> dict[str, Any]:
    try:
        data = loads(text)
    except (ValueError, RecursionError) as error:  # json.JSONDecodeError and TOMLDecodeError are ValueErrors
        raise ArgumentError(f"The device profile is not valid {kind}: {error}.", "Correct the file.") from error
    if not isinstance(data, dict):
        raise ArgumentError(f"The device profile is not a {kind} table of facts.", "Write one with profile.to_json().")
    return data


def toml_loads(text: str) -> dict[str, Any]:
    """Parses TOML with what this Python has: the standard library from 3.11 on."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    return tomllib.loads(text)
