"""Specs and tiles as plain data, for other processes and for cache keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from tcport.ir import FEW_SPLITS, AttentionSpec, KVLayout, TileConfig

# Sizes that kernels never specialise on: their value must not make a difference to what is compiled or cached.
_OPEN_SIZES = {"num_seqs": 4, "num_tokens": 64, "max_context": 1024}


def spec_data(spec: AttentionSpec) -> dict[str, Any]:
    """The compile-relevant part of a spec; sizes that stay open are set to placeholders, symbolic strides to None."""
    data: dict[str, Any] = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    for name, layout in (("k_layout", spec.k_layout), ("v_layout", spec.v_layout)):
        strides = dataclasses.asdict(layout).items()
        data[name] = {key: value if isinstance(value, int) else None for key, value in strides}
    return data | _OPEN_SIZES


def spec_of(data: dict[str, Any]) -> AttentionSpec:
    layouts = {name: KVLayout(**data[name]) for name in ("k_layout", "v_layout")}
    return AttentionSpec(**{**data, **layouts})


def config_data(config: TileConfig) -> dict[str, Any]:
    """A tile; of its splits only whether there are few or many, of its parts whether there are any.

    That is all that the compiled code knows.
    """
    splits, few = config.num_splits, isinstance(config.num_splits, int) and config.num_splits <= FEW_SPLITS
    cut = not (isinstance(config.parts, int) and config.parts == 0)
    number = 1 if splits == 1 else 4 if few else 4 * FEW_SPLITS
    return {**dataclasses.asdict(config), "num_splits": number, "parts": 4 if cut else 0}


def config_of(data: dict[str, Any]) -> TileConfig:
    return TileConfig(**data)
