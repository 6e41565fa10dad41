"""The chain of ``tcport::merge_states``: PyTorch, which Inductor fuses into one kernel."""

from __future__ import annotations

from tcport.device import DeviceProfile
from tcport.kernels import reference
from tcport.lowering.candidate import Candidate
from tcport.lowering.registry import Answer, register_lowering
from tcport.lowering.spec import MergeSpec


@register_lowering("merge_states", name="torch_merge")
def torch_merge(spec: MergeSpec, profile: DeviceProfile) -> Answer:
    """Elementwise throughout: Inductor's fused kernel reads and writes each element once."""
    return Candidate("torch_merge", "torch", lambda call, launch: reference.merge_states(**vars(call)))
