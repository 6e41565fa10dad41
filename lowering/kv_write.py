"""The chain of ``tcport::kv_write``: Triton, PyTorch."""

from __future__ import annotations

from typing import Any

from tcport.device import DeviceProfile
from tcport.kernels.call import Launcher, WriteCall
from tcport.lowering.candidate import Candidate, Verdict
from tcport.lowering.registry import Answer, register_lowering
from tcport.lowering.spec import WriteSpec


@register_lowering("kv_write", name="triton_write")
def triton_write(spec: WriteSpec, profile: DeviceProfile) -> Answer:
    """One program per token and head."""
    if profile.vendor == "cpu":
        return Verdict.no("Triton has no CPU target")
    return Candidate("triton_write", "tuned", _run_triton)


@register_lowering("kv_write", name="torch_write")
def torch_write(spec: WriteSpec, profile: DeviceProfile) -> Answer:
    """Plain PyTorch operations, compiled by Inductor where the graph is compiled."""
    return Candidate("torch_write", "torch", _run_torch)


def _run_triton(call: WriteCall, launch: Launcher) -> Any:
    from tcport.kernels.triton_write import kv_write

    return kv_write(call, launch)


def _run_torch(call: WriteCall, launch: Launcher) -> Any:
    from tcport.kernels import decomposition

    return decomposition.kv_write(call)
