"""Tiles that were measured to beat the model's choice: one table for each device identity, read when a chain is chosen.

A table holds for one kind of device as it was measured: its facts, driver, power limit, the compiler and the sources of
the kernels. Where any of these is another, the table is not looked at. It is a JSON file that equal machines can share.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tcport.device import DeviceProfile, nvidia_source
from tcport.errors import ArgumentError
from tcport.fingerprint import triton_version
from tcport.ir import AttentionSpec, TileConfig
from tcport.logs import logger
from tcport.tiling.problem import is_symbolic
from tcport.tiling.sources import kernel_sources
from tcport.user_cache import cache_folder, keep, kept

_FACTS = (
    "form", "num_q_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "query_dtype", "kv_dtype", "causal", "window",
    "chunk", "softcap", "alibi", "sinks", "mask", "kv_scales", "v_is_view_of_k",
)  # fmt: skip
_TILE = ("block_m", "block_n", "num_warps", "num_stages")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A tile that is faster than the model's choice.

    Attributes:
        facts: of the calls it is for (:func:`facts_of`).
        tile, model: it, and what it was compared with; block sizes, warps and stages as text.
        gain: the time of the model's choice over its own, as the geometric mean over ``cases``.
        cases: the sizes it was measured at, as ``tune`` spells them.
    """

    facts: Mapping[str, Any]
    tile: Mapping[str, int]
    model: str
    gain: float
    cases: tuple[str, ...]

    @property
    def why(self) -> str:
        """For the report of a compile."""
        percent = 100 * (self.gain - 1)
        return f"measured {percent:.1f}% faster than the model's {self.model} ({'; '.join(self.cases)})"

    def is_of(self, tile: TileConfig) -> bool:
        """Whether it is this tile, however its keys are split."""
        return all(getattr(tile, name) == size for name, size in self.tile.items())


@dataclasses.dataclass(frozen=True)
class Table:
    """What was measured on one kind of device; ``identity`` says which (:func:`identity_of`)."""

    identity: Mapping[str, Any]
    entries: tuple[Measured, ...] = ()

    def with_entries(self, entries: Iterable[Measured], tuned: Iterable[Mapping[str, Any]]) -> Table:
        """The table with new entries; what it had for the facts that were ``tuned`` is forgotten."""
        anew = [dict(facts) for facts in tuned]
        return Table(self.identity, (*(e for e in self.entries if dict(e.facts) not in anew), *entries))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for :func:`table_from`."""
        return {"identity": dict(self.identity), "entries": [dataclasses.asdict(entry) for entry in self.entries]}


def measured(spec: AttentionSpec, profile: DeviceProfile) -> Measured | None:
    """What was measured for calls like this one on this device; None where nothing was.

    It speaks for calls whose batch is open: where sizes are known, the model's choice for these was not what it beat.
    Nor for batch-invariant calls, which must get one tile whatever is known of their sizes.
    """
    if spec.batch_invariant or not is_symbolic(spec.num_seqs) or not cache_folder("tuned").is_dir():
        return None
    path = path_of(identity_of(profile))
    entries = _entries(path, path.stat().st_mtime_ns) if path.exists() else ()
    facts = facts_of(spec)
    return next((entry for entry in entries if dict(entry.facts) == facts), None)


def tile_of(config: Any) -> dict[str, int]:
    """What of a tile is compiled in; its number of splits comes from each call's sizes."""
    return {name: getattr(config, name) for name in _TILE}


def facts_of(spec: AttentionSpec) -> dict[str, Any]:
    """The facts of a call that a measurement is for: its sizes are left out, and of strides all but their order."""
    facts = {name: getattr(spec, name) for name in _FACTS}
    return facts | {"page_size": spec.k_layout.page_size, "head_major": bool(spec.k_layout.head_major)}


def identity_of(profile: DeviceProfile) -> dict[str, Any]:
    """What a measurement depends on: the device's facts, driver and power limit, the compiler, the kernels."""
    limit = nvidia_source.power_limit(profile.uuid) if profile.vendor == "nvidia" else None
    return {
        "device": profile.name or profile.arch or profile.vendor,
        "facts": profile.digest(),
        "driver": profile.driver_version,
        "power_limit_watts": limit,
        "triton": triton_version(),
        "kernels": kernel_sources(),
    }


def stored(identity: Mapping[str, Any]) -> Table:
    """The table of an identity; an empty one where nothing was measured."""
    path = path_of(identity)
    return table_from(kept(path), str(path)) if path.exists() else Table(identity)


def store(table: Table) -> Path:
    """Put a table in the place of the one of its identity, whole or not at all.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    path = path_of(table.identity)
    keep(path, table.to_dict())
    if kept(path) != json.loads(json.dumps(table.to_dict())):
        raise ArgumentError(f"{path} cannot be written.", "Set TCPORT_CACHE_DIR to a folder that can.")
    return path


def table_from(data: Any, name: str) -> Table:
    """A table from plain data.

    Raises:
        ArgumentError: the data, which came from ``name``, is no table.
    """
    try:
        entries = tuple(Measured(**{**entry, "cases": tuple(entry["cases"])}) for entry in data["entries"])
        for entry in entries:
            if set(entry.tile) != set(_TILE) or not all(type(size) is int for size in entry.tile.values()):
                raise ValueError(f"a tile has {', '.join(_TILE)}, all of them whole numbers")
            if type(entry.facts) is not dict or type(entry.gain) not in (int, float):
                raise ValueError("an entry has facts by name, and a gain that is a number")
            if not all(isinstance(text, str) for text in (entry.model, *entry.cases)):
                raise ValueError("model and cases are texts")
        return Table(dict(data["identity"]), entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is no table of measured tiles: {error!r}.", "Run tune again.") from error


def path_of(identity: Mapping[str, Any]) -> Path:
    """Where the table of an identity lies."""
    digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()
    return cache_folder("tuned") / f"{digest}.json"


def state() -> str:
    """Digest of every table of this machine, for the keys of compiled code."""
    tables = sorted(cache_folder("tuned").glob("*.json"))
    return hashlib.sha256(b"\0".join(table.read_bytes() for table in tables)).hexdigest() if tables else ""


@functools.lru_cache(maxsize=64)
def _entries(path: Path, stamp: int) -> tuple[Measured, ...]:
    try:
        return table_from(kept(path), str(path)).entries
    except ArgumentError as error:
        logger("chain").warning("%s", error)
        return ()
