"""The fallback chain as eager calls walk it: the first kernel that runs, and a record of those that did not."""

from __future__ import annotations

import functools
import traceback
from typing import Any

from tcport import history
from tcport.device import DeviceProfile, device_profile
from tcport.errors import KernelBuildError, KernelLaunchError
from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import NodeChoice, Operator, device_of
from tcport.lowering.registry import select
from tcport.report import FallbackReason

_quarantined: dict[tuple[str, str], FallbackReason] = {}


def run(operator: Operator, call: Any, *, kernel: str | None = None, strict: bool = False) -> Any:
    """Carry out a call on real tensors with the best kernel that works.

    A kernel that does not build, or needs more than the device has, is quarantined for this device and not tried
    again; the step is recorded in :func:`tcport.history.fallbacks`.

    Args:
        kernel: name of the only kernel to try.
        strict: the first failure is an error.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
        KernelLaunchError: the device reported a fault that no other kernel can survive in this process.
    """
    profile = device_profile(device_of(call))
    choice = _choice(operator, operator.spec(call), profile, kernel)
    for candidate, following in zip(choice.selection.candidates, [*choice.selection.candidates[1:], None], strict=True):
        key = (profile.digest(), str(candidate))
        if key in _quarantined:
            continue
        try:
            return candidate.run(call, _launch)
        except Exception as error:
            _raise_if_sticky(error, candidate)
            if strict or following is None or not _is_build_failure(error):
                raise
            reason = FallbackReason(
                operator.name, str(candidate), str(following), type(error).__name__, str(error).strip()[:500]
            )
            _quarantined[key] = reason
            history.record_fallback(reason)
    raise KernelBuildError(
        f"Every kernel for {operator.name} is quarantined on {profile.name}.", "See tcport.history.fallbacks()."
    )


@functools.lru_cache(maxsize=4096)
def _choice(operator: Operator, spec: Any, profile: DeviceProfile, kernel: str | None) -> NodeChoice:
    return NodeChoice(operator, spec, select(operator.name, spec, profile, kernel=kernel), profile)


def _launch(kernel: Any) -> Any:
    return kernel


def _is_build_failure(error: Exception) -> bool:
    """Whether an exception says that this kernel cannot be had here, so that another may."""
    if isinstance(error, (KernelBuildError, ImportError, OSError)):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    makers = ("triton.compiler", "triton.backends", "triton.runtime.errors")
    names = [type(error).__module__, *(frame.f_globals.get("__name__", "") for frame in frames)]
    return any(name.startswith(makers) for name in names)


def _raise_if_sticky(error: Exception, candidate: Candidate) -> None:
    """An illegal access poisons the CUDA context: every later call fails too, so stepping down would only hide it."""
    text = str(error).lower()
    if any(word in text for word in ("illegal memory access", "misaligned address", "device-side assert")):
        raise KernelLaunchError(
            f"{candidate} faulted on the device: {error}.",
            "The process has lost its device context: restart it, with TCPORT_DEBUG=1 to check tables and lengths.",
        ) from error
