"""The chains of the layer operators that end in a quantise: Triton, PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcport import quantise_ops as quantise_ops  # defines the operators
from tcport.device import DeviceProfile
from tcport.kernels import quantise
from tcport.kernels.call import Launcher
from tcport.lowering.candidate import Candidate
from tcport.lowering.foreign import ForeignCall, ForeignSpec
from tcport.lowering.layers import triton_takes_row
from tcport.lowering.registry import Answer, register_lowering


@register_lowering("tcport::silu_mul_quantise")
def triton_silu_mul_quantise(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """A row stays in registers between the product, its largest magnitude and its 8-bit values."""
    verdict = triton_takes_row(spec, profile)
    run = _triton("silu_mul_quantise")
    return Candidate("triton_silu_mul_quantise", "tuned", run) if verdict.ok else verdict


@register_lowering("tcport::silu_mul_quantise")
def torch_silu_mul_quantise(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, which Inductor fuses with what stands around them."""
    return Candidate("torch_silu_mul_quantise", "torch", _torch(quantise.silu_mul_quantise))


@register_lowering("tcport::add_rms_norm_quantise")
def triton_add_rms_norm_quantise(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """A row stays in registers between the sum, its norm and the norm's 8-bit values."""
    verdict = triton_takes_row(spec, profile)
    run = _triton("add_rms_norm_quantise")
    return Candidate("triton_add_rms_norm_quantise", "tuned", run) if verdict.ok else verdict


@register_lowering("tcport::add_rms_norm_quantise")
def torch_add_rms_norm_quantise(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, which Inductor fuses with what stands around them."""
    return Candidate("torch_add_rms_norm_quantise", "torch", _torch(quantise.add_rms_norm_quantise))


def _triton(name: str) -> Callable[[ForeignCall, Launcher], Any]:
    def run(call: ForeignCall, launch: Launcher) -> Any:
        from tcport.kernels import triton_quantise

        return getattr(triton_quantise, name)(*call.args, launch=launch)

    return run


def _torch(definition: Callable[..., Any]) -> Callable[[ForeignCall, Launcher], Any]:
    return lambda call, launch: definition(*call.args)
