"""Devices that are not in the room, and kernels that fail on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx

from tcport import quarantine
from tcport.describe import node_report
from tcport.device import DeviceProfile
from tcport.errors import ArgumentError, KernelBuildError
from tcport.lowering import registry
from tcport.lowering.agreement import check_numbers
from tcport.lowering.candidate import Candidate, Verdict
from tcport.report import GraphReport, NodeReport
from tcport.testing.graphs import interpreted


class _Lowered(BaseException):
    """Stops before the graph runs; nothing on the way may take it for a failure."""


def lower_on(
    profile: DeviceProfile,
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[NodeReport]:
    """Which kernel and tile each node of a function would get on a device, which need not be there.

    Every pass runs as in a compile, told of that device; nothing is compiled and nothing is run. The tensors may lie on
    any device, the CPU for instance.

    Args:
        profile: the facts of the device; ``tcport.device.catalog`` has those of many.

    Returns:
        One report per node that has kernels, in the graph's order.
    """
    nodes: list[NodeReport] = []

    def gather(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            choice = node.meta.get("tcport")
            if choice is not None:
                nodes.append(node_report(node, choice))
        raise _Lowered

    pretending = interpreted(
        fn, dynamic=dynamic, options=options, report=GraphReport(), profile=lambda device: profile, after=gather
    )
    torch.compiler.reset()
    with contextlib.suppress(_Lowered):
        pretending(*args, **kwargs)
    torch.compiler.reset()
    return nodes


def check_lowering(
    op: str, name: str, *, device: torch.device | str = "cpu", profile: DeviceProfile | None = None
) -> int:
    """Fail unless a registered lowering gives its operator's numbers on its sample inputs; returns how many it ran.

    Args:
        op: the operator, ``"namespace::name"``. name: the lowering.
        device: where it runs; a lowering that refuses the device is compared no times.
        profile: a device that is not here: what the lowering offers it runs on ``device`` in its place, Triton kernels
            in their interpreter (``TRITON_INTERPRET=1``). Samples that hold bfloat16 are left out, which the
            interpreter computes wrongly.

    Raises:
        ArgumentError: no such lowering, or it was registered without ``inputs``; or a Triton kernel would run on the
            CPU, and is not interpreted.
        AssertionError: the numbers differ by more than the tolerance it was registered with.
    """
    named = [row for row in registry.rows(op) if row.name == name]
    if not named:
        have = ", ".join(dict.fromkeys(row.name for row in registry.rows(op)))
        raise ArgumentError(
            f"There is no lowering {name!r} of {op!r}.",
            f"Its lowerings are {have}." if have else "It has none; import the module that registers them.",
        )
    found = [row for row in named if row.inputs is not None]
    if not found:
        raise ArgumentError(
            f"The lowering {name!r} of {op!r} has no sample inputs.",
            "Register it with inputs=..., a function that makes tuples of arguments.",
        )
    return sum(check_numbers(row, row.inputs, row.tolerance, device, profile) for row in found)  # type: ignore[arg-type]


@contextlib.contextmanager
def inject_failure(kernel: str, error: Exception | None = None) -> Iterator[None]:
    """Let a kernel fail whenever it is built, to see the chain step down.

    Args:
        kernel: its name, as ``options={"kernel": ...}`` spells it.
        error: what it raises; None: a :class:`tcport.errors.KernelBuildError`.

    Raises:
        ArgumentError: no kernel has that name.
    """
    failure = error or KernelBuildError(f"Kernel {kernel} does not build: injected.", "End the test's injection.")
    rows = [row for row in registry.all_rows() if row.name == kernel]
    if not rows:
        raise ArgumentError(
            f"There is no kernel named {kernel!r}.",
            f"Known kernels: {', '.join(sorted({row.name for row in registry.all_rows()}))}.",
        )
    with contextlib.ExitStack() as stack:
        for row in rows:
            stack.enter_context(registry.replaced(row, dataclasses.replace(row, lower=_failing(row.lower, failure))))
        stack.callback(quarantine.clear)
        yield


def _failing(lower: registry.LowerFn, failure: Exception) -> registry.LowerFn:
    def lower_to_failure(spec: Any, profile: DeviceProfile) -> registry.Answer:
        def fail(call: Any, launch: Any) -> Any:
            raise failure

        answer = lower(spec, profile)
        if isinstance(answer, Verdict):
            return answer
        answers = (answer,) if isinstance(answer, Candidate) else tuple(answer)
        return [dataclasses.replace(candidate, run=fail) for candidate in answers]

    return lower_to_failure
