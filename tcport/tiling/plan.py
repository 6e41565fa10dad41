"""Everything the optimizer knows about one call on one device, as a report: for people, and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tcport.device.profile import DeviceProfile
from tcport.errors import ArgumentError, KernelBuildError, OutOfResourcesError
from tcport.ir import AttentionSpec, KVLayout, TileConfig
from tcport.tiling.fit import Fit, fit
from tcport.tiling.optimizer import Ranking, TileLayoutOptimizer, rank_tiles
from tcport.tiling.problem import problem_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """A ranking with its reasons.

    Attributes:
        terms: every constraint and cost term of the first tile, with the numbers in.
        fit: the outcome of the compile check; None when it was not asked for or no tile passed it.
        refusal: why no tile passed the compile check.
    """

    spec: AttentionSpec
    profile: DeviceProfile
    ranking: Ranking
    terms: tuple[str, ...]
    fit: Fit | None = None
    refusal: str | None = None

    def of_sizes(self) -> str:
        """For which sizes estimates and terms are; "" where nothing is estimated."""
        if not self.ranking.costs:
            return ""
        problem = problem_of(self.spec)
        cases = problem.scenarios()
        named = f"{problem.num_seqs} sequences of {problem.max_context} keys"
        if len(cases) == 1:
            return f"Estimates are for {named}."
        seqs, keys = [c.num_seqs for c in cases], [c.max_context for c in cases]
        return (
            f"Sizes are open: estimates are the geometric mean over {len(cases)} calls with {_span(seqs)} sequences of "
            f"{_span(keys)} keys, the terms below are for {named}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data; expressions and tiles' split counts as text."""
        ranking = self.ranking
        costs = ranking.costs or (None,) * len(ranking.configs)
        return {
            "device": self.profile.to_dict(),
            "kernel": ranking.kernel,
            "configs": [
                {**_tile(config), "seconds": cost} for config, cost in zip(ranking.configs, costs, strict=True)
            ],
            "sizes": self.of_sizes(),
            "terms": list(self.terms),
            "rejected": [{**_tile(config), "reason": reason} for config, reason in ranking.rejected],
            "notes": list(ranking.notes),
            "compiled": None if self.fit is None else _fit(self.fit),
            "refusal": self.refusal,
        }


def make_plan(spec: AttentionSpec, profile: DeviceProfile, *, check: bool = True) -> Plan:
    """Ranks the tiles of a call, and compiles the best for the device's target unless ``check`` is False.

    Raises:
        ArgumentError: when the spec is impossible.
        NoTileError: when no tile fits by the constraints.
    """
    ranking = rank_tiles(spec, profile)
    terms: tuple[str, ...] = ()
    if profile.vendor != "cpu":
        terms = tuple(TileLayoutOptimizer(spec, profile).explain(ranking.configs[0]))
    plan = Plan(spec, profile, ranking, terms)
    if not check:
        return plan
    try:
        return dataclasses.replace(plan, fit=fit(spec, profile, ranking))
    except (OutOfResourcesError, KernelBuildError) as error:
        return dataclasses.replace(plan, refusal=str(error))


def _span(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{least}" if least == most else f"{least} to {most}"


def plain_spec(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    dim_qk: int,
    dim_v: int,
    page: int,
    batch: int,
    context: int,
    tokens: int | None,
    dtype: str,
    kv_dtype: str,
    latent: bool = False,
) -> AttentionSpec:
    """The spec of a plain causal call over a contiguous page-major cache.

    Args:
        tokens: query tokens of the whole batch; None: decode, one per sequence.
        latent: V is the first ``dim_v`` components of K (multi-head latent attention).

    Raises:
        ArgumentError: there is no page, sequence, key or token.
    """
    for name, number in (("page", page), ("batch", batch), ("context", context), ("tokens", tokens)):
        if number is not None and number < 1:
            raise ArgumentError(f"{name} is {number}.", "It must be at least 1.")
    k = KVLayout(page, page * num_kv_heads * dim_qk, num_kv_heads * dim_qk, dim_qk, 1)
    v = k if latent else KVLayout(page, page * num_kv_heads * dim_v, num_kv_heads * dim_v, dim_v, 1)
    return AttentionSpec(
        form="decode" if tokens is None else "varlen",
        num_seqs=batch,
        num_tokens=batch if tokens is None else tokens,
        max_context=context,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=dim_qk,
        head_dim_v=dim_v,
        query_dtype=dtype,
        kv_dtype=kv_dtype,
        k_layout=k,
        v_layout=v,
        kv_scales=kv_dtype.startswith("float8") or kv_dtype == "int8",
        v_is_view_of_k=latent,
    )


def _tile(config: TileConfig) -> dict[str, Any]:
    data = dataclasses.asdict(config)
    return data | {name: n if isinstance(n := data[name], int) else str(n) for name in ("num_splits", "parts")}


def _fit(accepted: Fit) -> dict[str, Any]:
    return {
        "config": _tile(accepted.config),
        "footprints": [dataclasses.asdict(footprint) for footprint in accepted.compiled.footprints],
        "unchecked": accepted.compiled.error,
        "verdict": accepted.verdict,
        "steps": [{**_tile(config), "reason": reason} for config, reason in accepted.steps],
    }
