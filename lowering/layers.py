"""The chains of ``tcport::silu_mul`` and ``tcport::add_rms_norm``: Triton, PyTorch."""

from __future__ import annotations

from typing import Any

from tcport import layer_ops as layer_ops  # defines the operators
from tcport.device import DeviceProfile
from tcport.kernels import layers
from tcport.kernels.call import Launcher
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.foreign import ForeignCall, ForeignSpec
from tcport.lowering.registry import Answer, register_lowering


@register_lowering("tcport::silu_mul")
def triton_silu_mul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """One read of both operands and one write."""
    verdict = triton_takes_row(spec, profile)
    return Candidate("triton_silu_mul", "tuned", _run_triton("silu_mul")) if verdict.ok else verdict


@register_lowering("tcport::silu_mul")
def torch_silu_mul(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, which Inductor fuses with what stands around them."""
    return Candidate("torch_silu_mul", "torch", lambda call, launch: layers.silu_mul(*call.args))


@register_lowering("tcport::add_rms_norm")
def triton_add_rms_norm(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """A row stays in registers between the sum and its norm."""
    verdict = triton_takes_row(spec, profile)
    return Candidate("triton_add_rms_norm", "tuned", _run_triton("add_rms_norm")) if verdict.ok else verdict


@register_lowering("tcport::add_rms_norm")
def torch_add_rms_norm(spec: ForeignSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, which Inductor fuses with what stands around them."""
    return Candidate("torch_add_rms_norm", "torch", lambda call, launch: layers.add_rms_norm(*call.args))


def _run_triton(name: str) -> Any:
    def run(call: ForeignCall, launch: Launcher) -> Any:
        from tcport.kernels import triton_layers

        return getattr(triton_layers, name)(*call.args, launch)

    return run


def triton_takes_row(spec: ForeignSpec, profile: DeviceProfile) -> Verdict:
    """Whether a kernel that holds a row of the first operand in registers can be used."""
    if profile.vendor == "cpu":
        return Verdict.no("Triton has no CPU target")
    width = spec.args[0].shape[-1]
    if not isinstance(width, int) or width > 32768:
        return Verdict.no(f"a program holds up to 32768 columns, not {width}")
    return Verdict(True)
