"""One case: tcport and its peers on the same inputs, checked, then timed beside the bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from tcport.bench.accuracy import check
from tcport.bench.bound import bound
from tcport.bench.cases import Case
from tcport.bench.inputs import Inputs, make_inputs
from tcport.bench.peers import PEERS
from tcport.bench.timing import host_microseconds, microseconds
from tcport.ops import kv_write, paged_attention

OURS = "tcport"


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of a case.

    Attributes:
        bound: microseconds of the yardstick: reading every page once, or copying what is written.
        times: microseconds by name, ours first.
        host: microseconds the host spends on one eager call of ours.
        error: our largest error, as a part of the largest result.
        left_out: why a peer has no time.
    """

    case: Case
    bound: float
    times: dict[str, float]
    host: float
    error: float
    left_out: dict[str, str]

    @property
    def tflops(self) -> float:
        """Of ours: only products of visible pairs count."""
        return self.case.flops / self.times[OURS] / 1e6

    def to_dict(self) -> dict[str, Any]:
        plain = dataclasses.asdict(self)
        return {"name": self.case.name, **plain, "time_over_bound": self.times[OURS] / self.bound}


def measure(case: Case, peers: Sequence[str] = tuple(PEERS)) -> Row:
    """Time a case on the current CUDA device.

    Raises:
        WrongResultError: results of ours, or of a peer, are not those of fp32 attention.
    """
    inputs = make_inputs(case)
    error = _check_ours(inputs[0])
    times, left_out = {OURS: microseconds(_ours, inputs)}, {}
    for name in peers:
        peer = PEERS[name]
        if reason := peer.refuses(case):
            left_out[name] = reason
            continue
        prepared = [(each, peer.prepare(each)) for each in inputs]
        check(inputs[0], peer.run(*prepared[0]))
        times[name] = microseconds(lambda pair, peer=peer: peer.run(*pair), prepared)
    host = host_microseconds(lambda: _ours(inputs[0]))
    return Row(case, bound(inputs), times, host, error, left_out)


def _ours(inputs: Inputs) -> Any:
    if inputs.case.kind == "write":
        return kv_write(**inputs.arguments)
    return paged_attention(**inputs.arguments)


def _check_ours(inputs: Inputs) -> float:
    """With a poisoned output: what the kernel leaves unwritten must not pass for a result."""
    if inputs.case.kind == "write":
        kv_write(**inputs.arguments)
        return check(inputs)
    query, values = inputs.arguments["query"], inputs.arguments["v_cache"]
    out = query.new_full((*query.shape[:-1], values.shape[-1]), torch.nan)
    paged_attention(**inputs.arguments, out=out)
    return check(inputs, out)
