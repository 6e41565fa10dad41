"""The chain of ``tcport::w4a16_matmul``: Triton, PyTorch."""

from __future__ import annotations

import functools

from tcport import int4_ops as int4_ops  # defines the operator
from tcport.device import DeviceProfile
from tcport.kernels import int4
from tcport.kernels.call import Launcher
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.foreign import ForeignCall, ForeignSpec
from tcport.lowering.registry import Answer, register_lowering


@register_lowering("tcport::w4a16_matmul")
def triton_w4a16_matmul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Weights are read as 4 bits and dequantised in registers."""
    x, packed, scales, _ = spec.args
    sizes = (packed.shape[0], *scales.shape)
    if profile.vendor == "cpu":
        return Verdict.no("Triton has no CPU target")
    if not all(isinstance(size, int) for size in sizes):
        return Verdict.no("its weights have no fixed shape")
    group = 8 * sizes[0] // sizes[1]
    if group % 32:
        return Verdict.no(f"it takes groups of a multiple of 32 weights, not {group}")
    if isinstance(x.shape[0], int) and x.shape[0] > int4.MOST_ROWS:
        return Verdict.no(
            f"for more than {int4.MOST_ROWS} rows weights are dequantised once, not for each block of rows"
        )
    if (profile.arch or "").startswith("sm_7"):
        return Verdict.no(f"it multiplies as GPUs from sm_80 do, not {profile.arch}")
    shared = profile.shared_per_cta_optin or profile.shared_per_cta
    return Candidate("triton_w4a16_matmul", "tuned", functools.partial(_run_triton, shared))


@register_lowering("tcport::w4a16_matmul")
def torch_w4a16_matmul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations: the weights are dequantised, then multiplied in the dtype of ``x``."""
    return Candidate(
        "torch_w4a16_matmul",
        "torch",
        lambda call, launch: int4.w4a16_matmul(*call.args, compute_dtype=call.args[0].dtype).contiguous(),
    )


def _run_triton(shared: int | None, call: ForeignCall, launch: Launcher) -> object:
    from tcport.kernels import triton_int4

    x, _, scales, _ = call.args
    tile = triton_int4.tile_for(int(scales.shape[1]), x.element_size(), shared)
    return triton_int4.w4a16_matmul(*call.args, launch=launch, tile=tile)
