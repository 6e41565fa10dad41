"""The chain of ``tcport::w4a16_matmul``: Gluon for NVIDIA's tensor cores, Triton, PyTorch."""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from tcport import int4_ops
from tcport.device import DeviceProfile, device_profile
from tcport.fingerprint import triton_version
from tcport.kernels import int4
from tcport.kernels.call import Launcher, is_traced
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.foreign import ForeignCall, ForeignSpec
from tcport.lowering.registry import Answer, register_lowering

_GLUON = ((3, 6), (3, 9))
"""Versions of Triton, first and last, whose Gluon a kernel is written in."""


@register_lowering("tcport::w4a16_matmul", vendor="nvidia", priority=10)
def gluon_w4a16_matmul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Each thread is brought what its tensor core wants; one opaque operator in traced code."""
    if (why := _refusal(spec, profile) or _gluon_refusal(spec, profile)) is not None:
        return Verdict.no(why)
    return Candidate("gluon_w4a16_matmul", "tuned", functools.partial(_run_gluon, profile))


@register_lowering("tcport::w4a16_matmul")
def triton_w4a16_matmul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Weights are read as 4 bits and dequantised in registers."""
    if (why := _refusal(spec, profile)) is not None:
        return Verdict.no(why)
    return Candidate("triton_w4a16_matmul", "tuned", functools.partial(_run_triton, _shared(profile)))


@register_lowering("tcport::w4a16_matmul")
def torch_w4a16_matmul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations: the weights are dequantised, then multiplied in the dtype of ``x``."""
    return Candidate(
        "torch_w4a16_matmul",
        "torch",
        lambda call, launch: int4.w4a16_matmul(*call.args, compute_dtype=call.args[0].dtype).contiguous(),
    )


def _refusal(spec: ForeignSpec, profile: DeviceProfile) -> str | None:
    """What no kernel for GPUs takes."""
    x, packed, scales, _ = spec.args
    sizes = (packed.shape[0], *scales.shape)
    if profile.vendor == "cpu":
        return "Triton has no CPU target"
    if not all(isinstance(size, int) for size in sizes):
        return "its weights have no fixed shape"
    if _group(spec) % 32:
        return f"it takes groups of a multiple of 32 weights, not {_group(spec)}"
    if isinstance(x.shape[0], int) and x.shape[0] > int4.MOST_ROWS:
        return f"for more than {int4.MOST_ROWS} rows weights are dequantised once, not for each block of rows"
    if (profile.arch or "").startswith("sm_7"):
        return f"it multiplies as GPUs from sm_80 do, not {profile.arch}"
    return None


def _gluon_refusal(spec: ForeignSpec, profile: DeviceProfile) -> str | None:
    """What else the kernel in Gluon does not take."""
    if profile.basic_mode:
        return f"hardware-specific, and the device is in basic mode: {profile.basic_mode}"
    version = tuple(map(int, re.findall(r"\d+", triton_version())[:2]))
    if not _GLUON[0] <= version <= _GLUON[1]:
        known = " to ".join(".".join(map(str, end)) for end in _GLUON)
        return f"written for the Gluon of Triton {known}, this is {triton_version()}"
    if spec.args[0].dtype not in ("float16", "bfloat16"):
        return f"tensor cores take 16-bit floats as they are, not {spec.args[0].dtype}"
    if _group(spec) % int4.STEP:
        return f"it takes groups of a multiple of {int4.STEP} weights, not {_group(spec)}"
    if _shared(profile) < int4.FEW_ROWS_SHARED:
        return f"a program adds sums in {int4.FEW_ROWS_SHARED} bytes of shared memory, and has {_shared(profile)}"
    return None


def _group(spec: ForeignSpec) -> int:
    """Weights of a column that share a scale."""
    return 8 * spec.args[1].shape[0] // spec.args[2].shape[0]


def _shared(profile: DeviceProfile) -> int:
    """Bytes of shared memory that a program can have; 0: unknown."""
    return profile.shared_per_cta_optin or profile.shared_per_cta or 0


def _run_gluon(profile: DeviceProfile, call: ForeignCall, launch: Launcher) -> Tensor:
    if is_traced(launch):
        return torch.ops.tcport.w4a16_few_rows.default(*call.args)  # Inductor cannot print Gluon
    from tcport.kernels.gluon_int4 import few_rows_matmul

    x, packed, scales, _ = call.args
    depth, width = int4.PER_WORD * int(packed.shape[0]), int(scales.shape[1])
    tile = int4.few_rows_tile(x.shape[0], depth, width, profile.compute_units, _shared(profile))
    return few_rows_matmul(*call.args, launch=launch, tile=tile)


def _few_rows(x: Tensor, *weights: Tensor | None) -> Tensor:
    return _run_gluon(device_profile(x.device), ForeignCall.of(x, *weights), lambda kernel: kernel)


int4_ops.define("w4a16_few_rows", _few_rows)


def _run_triton(shared: int, call: ForeignCall, launch: Launcher) -> object:
    from tcport.kernels import triton_int4

    x, _, scales, _ = call.args
    tile = triton_int4.tile_for(int(scales.shape[1]), x.element_size(), shared)
    return triton_int4.w4a16_matmul(*call.args, launch=launch, tile=tile)
