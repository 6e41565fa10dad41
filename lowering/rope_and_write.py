"""The chain of ``tcport::rope_and_write``: one Triton kernel; PyTorch operations and a kernel of ``kv_write``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tcport import rope_op as rope_op  # defines the operator
from tcport.device import DeviceProfile
from tcport.kernels.call import Launcher
from tcport.kernels.rope import RopeWriteCall, rotated
from tcport.lowering.candidate import Candidate, Selection, Verdict
from tcport.lowering.registry import Answer, Kernels, register_lowering, select
from tcport.lowering.spec import WriteSpec, dtype_name, write_spec

_FLOATS = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class RopeWriteSpec:
    """A rotation and a cache write, reduced to the facts that choose a kernel."""

    write: WriteSpec
    num_q_heads: int
    query_dtype: str
    norm: bool
    interleaved: bool


def rope_write_spec(call: RopeWriteCall) -> RopeWriteSpec:
    """The spec of a call on real or fake tensors."""
    heads, dtype = int(call.query.shape[1]), dtype_name(call.query.dtype)
    return RopeWriteSpec(write_spec(call.write), heads, dtype, call.q_weight is not None, call.interleaved)


def select_rope(spec: RopeWriteSpec, profile: DeviceProfile, *, kernel: Kernels = None) -> Selection:
    """The kernel that does it all, where there is one; then PyTorch operations before each kernel of the write.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    whole = select("rope_and_write", spec, profile, kernel=kernel)
    writes = select("kv_write", spec.write, profile, kernel=kernel)
    candidates = tuple(_with_writes(whole.candidates, writes.candidates))
    return Selection(candidates, whole.rejections + writes.rejections)


def _with_writes(whole: tuple[Candidate, ...], writes: tuple[Candidate, ...]) -> Iterator[Candidate]:
    for candidate in whole:
        if candidate.tier != "torch":
            yield candidate
            continue
        for write in writes:
            yield Candidate(
                f"{candidate.kernel}+{write.kernel}",
                write.tier,
                _run(write),
                write.config,
                write.why,
                write.options,
                loaded=write.loaded,
                source=f"{candidate.source} {write.source}",
            )


def _run(write: Candidate) -> Any:
    def run(call: RopeWriteCall, launch: Launcher) -> Any:
        query, key = rotated(call)
        write.run(dataclasses.replace(call.write, key=key), launch)
        return query

    return run


@register_lowering("rope_and_write", name="triton_rope_write")
def triton_rope_write(spec: RopeWriteSpec, profile: DeviceProfile) -> Answer:
    """Query and key are read once, and written once."""
    write = spec.write
    if profile.vendor == "cpu":
        return Verdict.no("Triton has no CPU target")
    if write.kv_scales or write.kv_dtype not in _FLOATS:
        return Verdict.no(f"it writes caches of 16 and 32 bit floats, not {write.kv_dtype} with or without scales")
    if spec.query_dtype not in _FLOATS:
        return Verdict.no(f"it computes in fp32, not {spec.query_dtype}")
    return Candidate("triton_rope_write", "tuned", _run_triton)


@register_lowering("rope_and_write", name="torch_rope")
def torch_rope(spec: RopeWriteSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, which Inductor fuses with what stands around them."""
    return Candidate("torch_rope", "torch", lambda call, launch: rotated(call))


def _run_triton(call: RopeWriteCall, launch: Launcher) -> Any:
    from tcport.kernels.triton_rope import rope_and_write

    return rope_and_write(call, launch)
