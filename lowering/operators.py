"""The operators that lowerings exist for: how a graph node becomes a call, and a call a spec."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from tcport import fused_ops as fused_ops  # defines write_and_attend
from tcport.device import DeviceProfile
from tcport.functional_write import FunctionalWrite
from tcport.kernels.call import AttentionCall, MergeCall, WriteAndAttendCall, WriteCall
from tcport.kernels.rope import RopeWriteCall
from tcport.lowering.candidate import Selection
from tcport.lowering.foreign import ForeignCall, chain_of, foreign_spec, overload_of
from tcport.lowering.registry import Kernels, registered_operators, select
from tcport.lowering.rope_and_write import rope_write_spec, select_rope
from tcport.lowering.spec import attention_spec, merge_spec, write_and_attend_spec, write_spec
from tcport.lowering.write_and_attend import select_both


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator that tcport lowers.

    Attributes:
        name: its name within the namespace ``tcport``, or ``"namespace::name"`` where it belongs to another library.
        call: from the operator's own arguments to the bundle that kernels take.
        spec: from that bundle to the facts that choose a kernel.
        chain: from those facts and a device to the chain of kernels; None: the registered lowerings of this operator.
    """

    name: str
    call: Callable[..., Any]
    spec: Callable[[Any], Any]
    chain: Callable[..., Selection] | None = None

    def caches(self, call: Any) -> list[torch.Tensor]:
        """The KV caches a call reads or writes, which no generated code may copy."""
        return [getattr(call, name) for name in ("k_cache", "v_cache") if hasattr(call, name)]

    def select(self, spec: Any, profile: DeviceProfile, kernel: Kernels) -> Selection:
        """The chain of kernels; arguments and errors as :func:`tcport.lowering.registry.select`."""
        if self.chain is not None:
            return self.chain(spec, profile, kernel=kernel)
        return select(self.name, spec, profile, kernel=kernel)

    @property
    def overload(self) -> Any:
        """The overload that graph nodes call."""
        return overload_of(self.name if "::" in self.name else f"tcport::{self.name}")


@dataclasses.dataclass(frozen=True)
class NodeChoice:
    """A node's spec and its chain, as ``node.meta["tcport"]`` holds them."""

    operator: Operator
    spec: Any
    selection: Selection
    profile: DeviceProfile


PAGED_ATTENTION = Operator("paged_attention", AttentionCall.of, attention_spec)
KV_WRITE = Operator("kv_write", WriteCall.of, write_spec)
WRITE_AND_ATTEND = Operator("write_and_attend", WriteAndAttendCall.of, write_and_attend_spec, select_both)
MERGE_STATES = Operator("merge_states", MergeCall.of, merge_spec)
ROPE_AND_WRITE = Operator("rope_and_write", RopeWriteCall.of, rope_write_spec, select_rope)
OPERATORS = (PAGED_ATTENTION, KV_WRITE, WRITE_AND_ATTEND, MERGE_STATES, ROPE_AND_WRITE)


def all_operators() -> tuple[Operator, ...]:
    """tcport's own operators, and those of other libraries that a lowering is registered for."""
    foreign = (name for name in registered_operators() if "::" in name)
    return (*OPERATORS, *(foreign_operator(name) for name in foreign))


@functools.cache
def foreign_operator(name: str) -> Operator:
    """An operator of another library, ``"namespace::name"``."""
    return Operator(name, ForeignCall.of, foreign_spec, chain_of(name))


def operator_of(node: torch.fx.Node) -> Operator | None:
    """The operator a graph node calls, in place or functionally, if there are lowerings for it."""
    if node.op != "call_function":
        return None
    write = FunctionalWrite.of(node)
    target = write.op if write is not None else node.target
    return next((operator for operator in all_operators() if target is operator.overload), None)


def choose(operator: Operator, call: Any, profile: DeviceProfile, kernel: Kernels = None) -> NodeChoice:
    """The chain for a call on real or fake tensors.

    Args:
        kernel: names of the only kernels to consider.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    return choose_for(operator, operator.spec(call), profile, kernel)


def choose_for(operator: Operator, spec: Any, profile: DeviceProfile, kernel: Kernels = None) -> NodeChoice:
    """The chain for a spec: the one place where compiled code and eager calls decide.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    return NodeChoice(operator, spec, operator.select(spec, profile, kernel), profile)


def call_of_node(
    operator: Operator, node: torch.fx.Node, value: str = "val", convert: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The call a node makes, on the fake tensors that its inputs' ``meta`` holds under the name ``value``.

    Args:
        convert: what is made of each of them.
    """
    write = FunctionalWrite.of(node)
    if write is not None:
        return operator.call(**{name: convert(given) for name, given in write.call_values().items()})
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: convert(n.meta[value]))
    return operator.call(*args, **kwargs)


def device_of(call: Any) -> torch.device:
    """The device the tensors of a call lie on."""
    return next(tensors_of(call)).device


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a call, or of any nest of its arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from tensors_of(tuple(vars(value).values()))
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
