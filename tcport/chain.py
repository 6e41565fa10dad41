"""The fallback chain: which links of a node are left, what a failure does to them, and eager calls as they walk it."""

from __future__ import annotations

import functools
from typing import Any

from tcport import history, quarantine
from tcport.bundle.store import named_folders
from tcport.cache_folders import settle_cache_folders
from tcport.counting import count
from tcport.device import DeviceProfile, device_profile, refreshes
from tcport.errors import KernelBuildError, KernelLaunchError, NoCandidateError, OutOfResourcesError, SelfTestError
from tcport.failures import cause_of, class_name, details, first_line, raise_if_sticky
from tcport.ir import TileConfig
from tcport.logs import logger
from tcport.lowering.candidate import Candidate, Rejection
from tcport.lowering.operators import NodeChoice, Operator, choose_for, device_of
from tcport.lowering.registry import Kernels, generation
from tcport.lowering.results import check_call_results
from tcport.lowering.spec import opened
from tcport.probes import trusted
from tcport.report import Cause, FallbackReason


def run(operator: Operator, call: Any, *, kernel: Kernels = None, strict: bool = False) -> Any:
    """Carry out a call on real tensors with the best kernel that works.

    It is chosen as compiled code chooses whose sizes are open: another batch or length takes the same kernels.

    Running another kernel after a failed one is safe: attention writes to fresh tensors only, and a cache write that
    was begun is repeated whole, with the same values into the same slots.

    Args:
        kernel: names of the only kernels to try.
        strict: the first failure is an error.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
        KernelBuildError, KernelLaunchError: see :func:`step_down`.
        KernelLaunchError: the device reported a fault that no other kernel can survive in this process.
    """
    profile = device_profile(device_of(call))
    state = (generation(), named_folders(), refreshes())
    choice = _choice(operator, opened(operator.spec(call)), profile, kernel, strict, state)
    aside: list[Rejection] = []
    for candidate in survivors(choice):
        if quarantine.reason(choice, candidate) is not None:
            continue  # it was lost together with the one before
        if (why := candidate.aside(call)) is not None:
            aside.append(Rejection(str(candidate), why))
            continue
        kernel_now, result = candidate, None
        try:
            for kernel_now, part in candidate.steps(call):
                result = kernel_now.run(part, _launch)
                check_call_results(str(kernel_now), part, result)
            return result
        except Exception as error:
            raise_if_sticky(error, str(kernel_now))
            cause = cause_of(error)
            if cause is None or kernel_now.plain:
                raise
            step_down(choice, candidate, kernel_now, error, cause, strict=strict)
    if aside:
        raise NoCandidateError(
            f"No kernel takes this {operator.name} call: {'; '.join(map(str, aside))}.",
            "Drop the option 'kernel' to allow other kernels.",
        )
    raise _no_link_left(choice, choice.selection.candidates[-1], None)


def survivors(choice: NodeChoice) -> list[Candidate]:
    """The links of a chain that have not failed, best first; never empty.

    Raises:
        KernelBuildError: every kernel that the options allow has failed before.
    """
    left = [c for c in choice.selection.candidates if quarantine.reason(choice, c) is None]
    if not left:
        first = choice.selection.candidates[0]
        raise _no_link_left(choice, first, quarantine.reason(choice, first))
    return left


def screened(choice: NodeChoice, *, node: str = "", strict: bool = False) -> NodeChoice:
    """The choice, after kernels whose self-test gave wrong numbers on this device have been left.

    Raises:
        KernelBuildError: see :func:`step_down`.
    """
    for candidate in choice.selection.candidates:
        for kernel in candidate.kernels:
            if not kernel.needs_compiler or quarantine.reason(choice, candidate) is not None:
                continue
            wrong = trusted(
                kernel.kernel, choice.profile, kernel.config if isinstance(kernel.config, TileConfig) else None
            )
            if wrong is not None:
                error = SelfTestError(
                    f"A self-test on this device, driver and compiler: {wrong}.",
                    "Report it with the versions that 'python -m tcport doctor' prints.",
                )
                step_down(choice, candidate, kernel, error, "wrong numbers", node=node, strict=strict)
    return choice


def step_down(
    choice: NodeChoice,
    candidate: Candidate,
    failed: Candidate,
    error: BaseException,
    cause: Cause,
    *,
    node: str = "",
    strict: bool = False,
) -> FallbackReason:
    """Quarantine a kernel that failed and record what takes its place.

    Without a working compiler no link that needs one can do better, and all of them are left at once.

    Args:
        candidate: the link that was tried. failed: the kernel of it that failed, the link itself where it is but one.
        node: the graph node; default: the operator.
        strict: the step is an error.

    Raises:
        KernelBuildError, OutOfResourcesError, KernelLaunchError: the options forbid the step, or nothing is left.
    """
    lost = {
        key: kernel
        for link in choice.selection.candidates
        for kernel, key in quarantine.keys_of(choice, link).items()
        if kernel == failed or (cause == "toolchain" and kernel.needs_compiler)
    }
    left = [
        link
        for link in choice.selection.candidates
        if not lost.keys() & set(quarantine.keys_of(choice, link).values()) and quarantine.reason(choice, link) is None
    ]
    to = _replacement(candidate, failed, left[0], cause) if left else "nothing"
    reason = FallbackReason(
        node or choice.operator.name, str(failed), to, cause, class_name(error), first_line(error), details(error)
    )
    if strict:
        raise _error(cause)(
            f"{failed} for {reason.node} failed ({cause}): {reason.error}: {reason.message.rstrip('.')}.",
            "Drop the option 'strict' to go on with the next kernel.",
        ) from error
    for key in lost:
        quarantine.add(key, reason)
    history.record_fallback(reason)
    count(f"fallback {cause}")
    logger("chain").warning("%s", reason)
    if not left:
        raise _no_link_left(choice, failed, reason) from error
    return reason


def _replacement(candidate: Candidate, failed: Candidate, following: Candidate, cause: Cause) -> str:
    """The kernel that does what the failed one did; the whole link where more than that one kernel is lost."""
    if cause == "toolchain":
        return str(following)
    return str(following.kernels[candidate.kernels.index(failed)])


def _no_link_left(choice: NodeChoice, failed: Candidate, reason: FallbackReason | None) -> Exception:
    cause = reason.cause if reason else "build"
    said = f": {reason.error}: {reason.message}" if reason else ""
    return _error(cause)(
        f"No kernel is left for {choice.operator.name} on {choice.profile.name or choice.profile.vendor}; "
        f"{failed} failed ({cause}){said}.",
        "Drop the option 'kernel' to allow other kernels; tcport.history.fallbacks() has every step.",
    )


def _error(cause: Cause) -> type[KernelBuildError] | type[KernelLaunchError]:
    return {"launch": KernelLaunchError, "resources": OutOfResourcesError}.get(cause, KernelBuildError)


@functools.lru_cache(maxsize=4096)
def _choice(
    operator: Operator, spec: Any, profile: DeviceProfile, kernel: Kernels, strict: bool, state: object
) -> NodeChoice:
    settle_cache_folders()
    return screened(choose_for(operator, spec, profile, kernel), strict=strict)


def _launch(kernel: Any) -> Any:
    return kernel
