"""The operators that lowerings exist for: how a graph node becomes a call, and a call a spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tcport.device import DeviceProfile
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall
from tcport.lowering.candidate import Selection
from tcport.lowering.registry import select
from tcport.lowering.spec import attention_spec, merge_spec, write_spec


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator of the namespace ``tcport``.

    Attributes:
        name: its name within the namespace.
        call: from the operator's own arguments to the bundle that kernels take.
        spec: from that bundle to the facts that choose a kernel.
    """

    name: str
    call: Callable[..., Any]
    spec: Callable[[Any], Any]

    def caches(self, call: Any) -> list[torch.Tensor]:
        """The KV caches a call reads or writes, which no generated code may copy."""
        return [getattr(call, name) for name in ("k_cache", "v_cache") if hasattr(call, name)]

    @property
    def overload(self) -> Any:
        """``torch.ops.tcport.<name>.default``."""
        return getattr(torch.ops.tcport, self.name).default


@dataclasses.dataclass(frozen=True)
class NodeChoice:
    """A node's spec and its chain, as ``node.meta["tcport"]`` holds them."""

    operator: Operator
    spec: Any
    selection: Selection
    profile: DeviceProfile


PAGED_ATTENTION = Operator("paged_attention", AttentionCall.of, attention_spec)
KV_WRITE = Operator("kv_write", WriteCall.of, write_spec)
MERGE_STATES = Operator("merge_states", MergeCall.of, merge_spec)
OPERATORS = (PAGED_ATTENTION, KV_WRITE, MERGE_STATES)


def operator_of(node: torch.fx.Node) -> Operator | None:
    """The operator a graph node calls, if it is one of tcport's."""
    if node.op != "call_function":
        return None
    return next((operator for operator in OPERATORS if node.target is operator.overload), None)


def choose(operator: Operator, call: Any, profile: DeviceProfile, kernel: str | None = None) -> NodeChoice:
    """The chain for a call on real or fake tensors.

    Args:
        kernel: name of the only kernel to consider.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    spec = operator.spec(call)
    return NodeChoice(operator, spec, select(operator.name, spec, profile, kernel=kernel), profile)


def call_of_node(operator: Operator, node: torch.fx.Node, value: str = "val") -> Any:
    """The call a node makes, on the fake tensors that its inputs' ``meta`` holds under the name ``value``."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta[value])
    return operator.call(*args, **kwargs)


def device_of(call: Any) -> torch.device:
    """The device the tensors of a call lie on."""
    return next(value.device for value in vars(call).values() if isinstance(value, torch.Tensor))
