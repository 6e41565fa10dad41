"""What an exception says about the kernel that raised it: why it failed, and whether another may do better.

Compilers, assemblers and drivers raise no common class, and Inductor rewrites what they raise in its worker processes
into text. An exception is therefore known by its class, by where it was raised, and last by its words.
"""

from __future__ import annotations

import re
import traceback

import torch

from tcport.errors import (
    BundleError,
    KernelBuildError,
    KernelLaunchError,
    OutOfResourcesError,
    SelfTestError,
    TcportError,
    causes,
    text_of,
    wrapped_by,
)
from tcport.report import Cause

# In the words of torch and Triton, and by the names of CUDA's and HIP's codes. Compilers have words close to these.
_STICKY = re.compile(
    r"illegal memory access|illegal instruction was encountered|misaligned address|on global/shared address space"
    r"|invalid program counter|device-side assert triggered|unspecified launch failure|launch timed out"
    r"|hardware stack error|uncorrectable ECC|memory access fault|device[ _]lost"
    r"|CUDA_ERROR_(ILLEGAL|MISALIGNED|INVALID_ADDRESS|INVALID_PC|LAUNCH_FAILED|LAUNCH_TIMEOUT|ASSERT|HARDWARE|ECC)"
    r"|hipError(IllegalAddress|LaunchFailure|LaunchTimeOut|Assert|ECC)",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: .*memory|std::bad_alloc")  # on the CPU torch has no class for it
_TOOLCHAIN = re.compile(
    r"failed to find c compiler|cannot find (ptxas|cuobjdump|nvdisasm)|no working c\+\+ compiler|InvalidCxxCompiler"
    r"|Python\.h: No such file|ptxas'?: No such file|Permission denied: '[^']*ptxas|triton/runtime/(build|cache)\.py",
    re.IGNORECASE,
)
_RESOURCES = re.compile(r"out of resource|OutOfResources|too many resources|OUT_OF_RESOURCES", re.IGNORECASE)
_LAUNCH = re.compile(
    r"Triton Error \[|CUDA (driver )?error|HIP error|Level.?Zero error|cuLaunchKernel|hipModuleLaunch", re.IGNORECASE
)
_BUILD = re.compile(
    r"No valid triton configs|CompilationError|PTXAS error|PassManager::run failed|ptxas fatal"
    r"|triton[./](compiler|backends)|subprocess exited unexpectedly"
)
_COMPILERS = ("triton.compiler", "triton.backends", "triton.runtime.errors")
_TOOLS = ("triton.runtime.build", "triton.runtime.cache")
_DIRECT = "tcport._inductor.launch.direct"


def cause_of(error: BaseException) -> Cause | None:
    """Why the kernel that raised ``error`` cannot be had here; None when the error says nothing about the kernel.

    None covers errors in the call itself and in hooks of the user's, memory that ran out, and plain bugs: another
    kernel would meet them too, or would hide them. It covers the last word of a chain within the kernel, too, which has
    named its own.
    """
    chain = list(causes(error))
    if _ran_out_of_memory(error):
        return None
    own = next((e for e in chain if isinstance(e, TcportError)), None)
    if own is not None:
        return _cause_of_own(own)
    text = "\n".join(f"{type(e).__name__}: {text_of(e)}" for e in chain)
    if _TOOLCHAIN.search(text) or any(_raised_in(e, _TOOLS) for e in chain):
        return "toolchain"
    if any(isinstance(e, OSError) and _raised_in(e, (*_COMPILERS, "torch._inductor.cpp_builder")) for e in chain):
        return "toolchain"
    if _RESOURCES.search(text):
        return "resources"
    if _LAUNCH.search(text):
        return "launch"
    if _raised_by_hook(error):
        return None
    if any(_refused_at_launch(e) for e in chain):
        return "launch"
    if _BUILD.search(text) or any(_raised_in(e, _COMPILERS) for e in chain):
        return "build"
    return "unavailable" if any(isinstance(e, ImportError) for e in chain) else None


def cause_within(error: BaseException) -> Cause | None:
    """Why a kernel of a chain is left that raised ``error`` while it ran, or was traced.

    As :func:`cause_of`; a plain bug is the kernel's own here, since a call is checked before its chain is walked, and
    counts as a kernel that was not built right. None: the call itself is wrong after all, memory ran out, or a hook of
    the user's raised.
    """
    cause = cause_of(error)
    if cause is None and own_error(error) is None and not _ran_out_of_memory(error) and not _raised_by_hook(error):
        return "build"
    return cause


def raise_if_sticky(error: BaseException, kernel: str) -> None:
    """Raise where the device context is lost: every later call fails too, so stepping down would only hide it.

    Raises:
        KernelLaunchError: the device reported an illegal access or the like.
    """
    text = "\n".join(map(text_of, causes(error)))
    if _STICKY.search(text):
        raise KernelLaunchError(
            f"The device faulted in {kernel}, or in work started before it: {first_line(error)}.",
            "The process has lost its device context and must be restarted; check block tables and lengths first.",
        ) from error


def first_line(error: BaseException) -> str:
    """What an exception says in one line: the compiler's own words where Inductor wrapped them."""
    inner = wrapped_by(error) or error
    lines = [line.strip() for line in text_of(inner).splitlines() if line.strip()]
    if lines and lines[0].startswith("An exception occurred in a subprocess"):
        lines = lines[-1:]
    return lines[0][:500] if lines else type(inner).__name__


def details(error: BaseException) -> str:
    """The exception with its traceback, as text: an exception object would keep the tensors of its frames alive."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-20_000:]


def class_name(error: BaseException) -> str:
    """The class of an exception, or of the one that Inductor wrapped."""
    return type(wrapped_by(error) or error).__name__


def own_error(error: BaseException) -> TcportError | None:
    """The error of tcport's own that an exception is, or wraps."""
    return next((e for e in causes(error) if isinstance(e, TcportError)), None)


def _cause_of_own(error: TcportError) -> Cause | None:
    if error.final:
        return None
    kinds: tuple[tuple[type[TcportError], Cause], ...] = (
        (OutOfResourcesError, "resources"),
        (SelfTestError, "wrong numbers"),
        (BundleError, "unavailable"),
        (KernelBuildError, "build"),
        (KernelLaunchError, "launch"),
    )
    return next((cause for kind, cause in kinds if isinstance(error, kind)), None)


def _ran_out_of_memory(error: BaseException) -> bool:
    kinds = (torch.OutOfMemoryError, MemoryError)
    return any(isinstance(e, kinds) or _OUT_OF_MEMORY.search(text_of(e)) for e in causes(error))


def _raised_in(error: BaseException, modules: tuple[str, ...]) -> bool:
    """Whether an exception was raised within modules of these names, or is of a class of theirs."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [type(error).__module__, *(frame.f_globals.get("__name__", "") for frame in frames)]
    return any(name.startswith(modules) for name in names)


def _raised_by_hook(error: BaseException) -> bool:
    """Whether what Triton calls at launches or compiles for someone else, such as a profiler, raised it."""
    frames = (frame for e in causes(error) for frame, _ in traceback.walk_tb(e.__traceback__))
    return any(f.f_globals.get("__name__") == "triton.knobs" and f.f_code.co_name == "__call__" for f in frames)


def _refused_at_launch(error: BaseException) -> bool:
    """Whether a driver's function raised it that compiled code calls: whatever else is called there has frames."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == _DIRECT
