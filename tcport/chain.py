"""The fallback chain: which links of a node are left, what a failure does to them, and eager calls as they walk it."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

from tcport import history, quarantine
from tcport.bundle.store import named_folders
from tcport.cache_folders import settle_cache_folders
from tcport.counting import count
from tcport.device import DeviceProfile, device_profile, refreshes
from tcport.errors import (
    KernelBuildError,
    KernelLaunchError,
    NoCandidateError,
    OutOfResourcesError,
    SelfTestError,
    TcportError,
)
from tcport.failures import cause_of, cause_within, class_name, details, first_line, raise_if_sticky
from tcport.ir import TileConfig
from tcport.logs import logger
from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import NodeChoice, Operator, choose_for, device_of
from tcport.lowering.registry import Kernels, generation
from tcport.lowering.results import check_call_results
from tcport.lowering.spec import kind_of
from tcport.probes import probe, trusted
from tcport.report import Cause, FallbackReason


class Chosen(NamedTuple):
    """A choice, and for each of its links why it is not to be tried, as it was when it was made."""

    choice: NodeChoice
    lost: tuple[FallbackReason | None, ...]


def run(operator: Operator, call: Any, *, kernel: Kernels = None, strict: bool = False) -> Any:
    """Carry out a call on real tensors with the best kernel that works.

    Args:
        kernel: names of the only kernels to try.
        strict: the first failure is an error.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
        NoCandidateError, KernelBuildError, KernelLaunchError: see :func:`walk`.
    """
    return walk(chosen(operator, call, kernel=kernel), call, strict=strict)


def chosen(operator: Operator, call: Any, *, kernel: Kernels = None) -> Chosen:
    """The kernels for a call on real tensors; arguments and errors as :func:`run`.

    They are chosen as compiled code chooses whose sizes are open: another batch or length takes the same kernels, but
    for small decode batches (:func:`tcport.lowering.spec.kind_of`).
    """
    profile = device_profile(device_of(call))
    state = (generation(), named_folders(), refreshes())
    choice = _choice(operator, kind_of(operator.spec(call)), profile, kernel, state)
    return Chosen(choice, tuple(quarantine.reason(choice, link) for link in choice.selection.candidates))


def walk(chosen: Chosen, call: Any, *, strict: bool = False) -> Any:
    """Carry out a call with the first of its kernels that works.

    Running another kernel after a failed one is safe: attention writes to fresh tensors only, and a cache write that
    was begun is repeated whole, with the same values into the same slots.

    Raises:
        NoCandidateError: every kernel stands aside.
        KernelBuildError, KernelLaunchError: see :func:`step_down`.
        KernelLaunchError: the device reported a fault that no other kernel can survive in this process.
    """
    choice, stepped_down = chosen.choice, False
    aside: list[tuple[Candidate, str]] = []
    lost: list[tuple[Candidate, FallbackReason]] = []
    for candidate, reason in zip(choice.selection.candidates, chosen.lost, strict=True):
        if (why := _aside(candidate, call)) is not None:
            aside.append((candidate, why))
            continue
        if stepped_down:
            reason = quarantine.reason(choice, candidate)  # it may be lost together with the one before
        if reason is not None:
            if strict:
                raise _failed_before(candidate, choice.operator.name, reason)
            lost.append((candidate, reason))
            continue
        kernel_now, result = candidate, None
        try:
            for kernel_now, part in candidate.steps(call):
                result = kernel_now.run(part, _launch)
                check_call_results(kernel_now, part, result)
            return result
        except Exception as error:
            raise_if_sticky(error, str(kernel_now))
            # What is loaded was built right. The C++ kernels look at lengths and pages: their errors are the caller's.
            cause = cause_of(error) if kernel_now.loaded else cause_within(error)
            if cause is None or kernel_now.plain:
                raise
            step_down(choice, candidate, kernel_now, error, cause, strict=strict, aside=[link for link, _ in aside])
            screened(choice)
            stepped_down = True
    if lost:
        raise _no_link_left(choice, *lost[0])
    raise NoCandidateError(
        f"No kernel takes this {choice.operator.name} call: {'; '.join(f'{link}: {why}' for link, why in aside)}.",
        "Drop the option 'kernel' to allow other kernels.",
    )


def _aside(candidate: Candidate, call: Any) -> str | None:
    """Why any kernel of a candidate is not for a call."""
    try:
        if not candidate.parts:
            return candidate.aside(call)
        said = (kernel.aside(part) for kernel, part in candidate.steps(call))
        return next((why for why in said if why is not None), None)
    except Exception as error:  # noqa: BLE001  (it costs its kernel the call, and is told)
        why = f"it cannot say whether it stands aside: {class_name(error)}: {first_line(error)}"
        _warn_of_link(str(candidate), why)
        return why


@functools.lru_cache(maxsize=256)
def _warn_of_link(link: str, said: str) -> None:
    logger("chain").warning("%s: %s", link, said)


def survivors(choice: NodeChoice) -> list[Candidate]:
    """The links of a chain that have not failed, best first; never empty.

    Raises:
        KernelBuildError: every kernel that the options allow has failed before.
    """
    left: list[Candidate] = []
    lost: list[tuple[Candidate, FallbackReason]] = []
    for candidate in choice.selection.candidates:
        reason = quarantine.reason(choice, candidate)
        if reason is None:
            left.append(candidate)
        else:
            lost.append((candidate, reason))
    if not left:
        raise _no_link_left(choice, *lost[0])
    return left


def screened(choice: NodeChoice, *, node: str = "", strict: bool = False, every: bool = False) -> NodeChoice:
    """The choice, after kernels whose self-test gave wrong numbers on this device have been left.

    Self-tests need a compiler. Where a link comes first that was compiled ahead, those behind it are not tested before
    it has failed.

    Args:
        node: the graph node; default: the operator.
        strict: it is an error where the first link is lost, now or before.
        every: test those behind it all the same.

    Raises:
        KernelBuildError: see :func:`step_down`.
    """
    first = choice.selection.candidates[0]
    if strict and (lost := quarantine.reason(choice, first)) is not None:
        raise _failed_before(first, node or choice.operator.name, lost)
    tested = {kernel.kernel for link in choice.selection.candidates for kernel in link.kernels if kernel.needs_compiler}
    for candidate in choice.selection.candidates:
        for kernel in candidate.kernels:
            if not kernel.needs_compiler or quarantine.reason(choice, candidate) is not None:
                continue
            probe(choice.profile, tested)  # all of the chain at once
            wrong = trusted(
                kernel.kernel, choice.profile, kernel.config if isinstance(kernel.config, TileConfig) else None
            )
            if wrong is not None:
                error = SelfTestError(
                    f"A self-test on this device, driver and compiler: {wrong}.",
                    "Report it with the versions that 'python -m tcport doctor' prints.",
                )
                forbidden = strict and candidate is first
                step_down(choice, candidate, kernel, error, "wrong numbers", node=node, strict=forbidden)
        ahead = all(kernel.tier in ("blob", "torch") for kernel in candidate.kernels)
        if ahead and not every and quarantine.reason(choice, candidate) is None:
            break
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
    aside: Collection[Candidate] = (),
) -> FallbackReason:
    """Quarantine a kernel that failed and record what takes its place.

    Without a working compiler no link that needs one can do better, and all of them are left at once.

    Args:
        candidate: the link that was tried. failed: the kernel of it that failed, the link itself where it is but one.
        node: the graph node; default: the operator.
        strict: the step is an error.
        aside: links that are not for the call at hand, and take nothing's place.

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
        if link not in aside
        and not lost.keys() & set(quarantine.keys_of(choice, link).values())
        and quarantine.reason(choice, link) is None
    ]
    to = _replacement(candidate, failed, left[0], cause) if left else "nothing"
    reason = FallbackReason(
        node or choice.operator.name, str(failed), to, cause, class_name(error), first_line(error), details(error)
    )
    if strict:
        raise _forbidden(failed, reason.node, "failed", reason) from error
    if sum(quarantine.add(key, reason) for key in lost):  # else another thread has said so
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


def _failed_before(candidate: Candidate, node: str, reason: FallbackReason) -> TcportError:
    return _forbidden(candidate, node, f"is not tried again: {reason.kernel} failed", reason)


def _forbidden(candidate: Candidate, node: str, how: str, reason: FallbackReason) -> TcportError:
    return _last_word(
        reason.cause,
        f"{candidate} for {node} {how} ({reason.cause}): {reason.error}: {reason.message.rstrip('.')}.",
        "Drop the option 'strict' to go on with the next kernel.",
    )


def _no_link_left(choice: NodeChoice, failed: Candidate, reason: FallbackReason) -> TcportError:
    return _last_word(
        reason.cause,
        f"No kernel is left for {choice.operator.name} on {choice.profile.name or choice.profile.vendor}; "
        f"{failed} failed ({reason.cause}): {reason.error}: {reason.message}.",
        "Drop the option 'kernel' to allow other kernels; tcport.history.fallbacks() has every step.",
    )


def _last_word(cause: Cause, said: str, remedy: str) -> TcportError:
    kinds: dict[Cause, type[TcportError]] = {"launch": KernelLaunchError, "resources": OutOfResourcesError}
    error = kinds.get(cause, KernelBuildError)(said, remedy)
    error.final = True
    return error


@functools.lru_cache(maxsize=4096)
def _choice(operator: Operator, spec: Any, profile: DeviceProfile, kernel: Kernels, state: object) -> NodeChoice:
    settle_cache_folders()
    return screened(choose_for(operator, spec, profile, kernel))


def _launch(kernel: Any) -> Any:
    return kernel
