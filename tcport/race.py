"""Kernels that race for a node: who takes part, and an example that each of them has to get through first."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tcport.chain import survivors
from tcport.counting import count
from tcport.failures import cause_within, raise_if_sticky
from tcport.fingerprint import fingerprint
from tcport.logs import logger
from tcport.lowering.candidate import Candidate
from tcport.lowering.example import example
from tcport.lowering.operators import NodeChoice, tensors_of
from tcport.options import Options
from tcport.report import Cause


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A link that works on the example; ``identity`` stands for link, device and sizes."""

    link: Candidate
    identity: str
    run: Callable[[], object]


Failure = tuple[Candidate, Candidate, Exception, Cause]
"""A link, the kernel of it that failed on the example, the exception, and what it says."""


def contenders(choice: NodeChoice, options: Options) -> list[Candidate]:
    """The links that are to race for a node, none where the chain's order decides.

    Several kernels that options name race, and under ``max-autotune`` whatever is left of the chain. Plain PyTorch
    operations take part only where they are named: in a race they run uncompiled.
    """
    asked = options.kernel if isinstance(options.kernel, tuple) else ()
    if not asked and not options.autotunes:
        return []

    def enters(kernel: Candidate) -> bool:
        return kernel.kernel in asked or kernel.tier != "torch"

    return [link for link in survivors(choice) if all(map(enters, link.kernels))]


def entered(choice: NodeChoice, links: Sequence[Candidate], call: Any) -> tuple[list[Entrant], list[Failure]]:
    """The links that carry out an example of a call, each run once, and those that do not.

    Args:
        call: the node's call, on fake tensors of known sizes. Where a size is unknown, or there is no memory for an
            example, nobody races.

    Raises:
        KernelLaunchError: the device context is lost.
    """
    entrants: list[Entrant] = []
    failures: list[Failure] = []
    lost: list[Candidate] = []
    try:
        real = example(call, v_is_view_of_k=_shares_memory(choice.spec))
        if real is None:
            return [], []
        for link in links:
            if any(kernel in lost or kernel.aside(part) is not None for kernel, part in link.steps(real)):
                continue
            failure = _failure(link, real)
            if failure is None:
                count("kernels raced")
                entrants.append(Entrant(link, _identity(choice, link, call), lambda link=link: _run(link, real)))
            else:
                failures.append(failure)
                lost.append(failure[1])
    except torch.OutOfMemoryError as error:
        logger("chain").warning("%s: no memory for a race, the first kernel is taken: %s", choice.operator.name, error)
        return [], failures
    return entrants, failures


def _shares_memory(spec: Any) -> bool:
    return getattr(getattr(spec, "attend", spec), "v_is_view_of_k", False)


def _failure(link: Candidate, call: Any) -> Failure | None:
    running = link
    try:
        for kernel, part in link.steps(call):
            running = kernel
            kernel.run(part, _eagerly)
    except Exception as error:
        raise_if_sticky(error, str(running))
        cause = cause_within(error)
        if cause is None:
            raise
        return link, running, error, cause
    return None


def _run(link: Candidate, call: Any) -> None:
    for kernel, part in link.steps(call):
        kernel.run(part, _eagerly)


def _eagerly(kernel: Any) -> Any:
    return kernel


def _identity(choice: NodeChoice, link: Candidate, call: Any) -> str:
    sizes = [f"{t.dtype}{tuple(t.shape)}{t.stride()}" for t in tensors_of(call)]
    facts = (fingerprint(), choice.profile.digest(), link.source, str(link), repr(choice.spec), *sizes)
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
