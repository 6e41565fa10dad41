"""What an exception says about a kernel: which errors another kernel may survive, and which no kernel can."""

from __future__ import annotations

import pytest
import torch
from triton.knobs import HookChain

from tcport.errors import KernelLaunchError
from tcport.failures import cause_of, cause_within, class_name, first_line, raise_if_sticky

# What torch says beneath every CUDA error, whatever the error is.
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
Device-side assertions were explicitly omitted for this error check; the error probably arose while initializing the DSA
handlers.
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("CUDA error: too many resources requested for launch", "resources"),
        ("CUDA error: invalid configuration argument", "launch"),
        ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", "launch"),
    ],
)
def test_torchs_advice_on_device_side_assertions_is_no_fault_of_the_device(said: str, cause: str) -> None:
    error = RuntimeError(said + ADVICE)
    raise_if_sticky(error, "a kernel")
    assert cause_of(error) == cause


@pytest.mark.parametrize(
    "said", ["CUDA error: device-side assert triggered", "CUDA error: an illegal memory access was encountered"]
)
def test_a_fault_of_the_device_is_one(said: str) -> None:
    with pytest.raises(KernelLaunchError, match="must be restarted"):
        raise_if_sticky(RuntimeError(said + ADVICE), "a kernel")


@pytest.mark.parametrize(
    "code",
    ["CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_INVALID_PC", "hipErrorLaunchFailure"],
)
def test_a_fault_of_the_device_is_one_by_the_name_of_its_code(code: str) -> None:
    """As cuda-python and hip-python name it when a kernel of a bundle is launched."""
    with pytest.raises(KernelLaunchError, match="must be restarted"):
        raise_if_sticky(KernelLaunchError(f"cuLaunchKernel of attend failed: {code}.", "See above."), "a kernel")


@pytest.mark.parametrize(
    "said",
    [
        "error: Illegal instruction detected: VOP3 has too many operands",
        "'llvm.addrspacecast' has invalid address space",
    ],
)
def test_what_a_compiler_refuses_is_no_fault_of_the_device(said: str) -> None:
    raise_if_sticky(RuntimeError(said), "a kernel")
    assert cause_within(RuntimeError(said)) == "build"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 35184372088832 bytes. Error code 12 (Cannot allocate memory)"
        ),
    ],
)
def test_memory_that_ran_out_costs_no_kernel(error: Exception) -> None:
    assert cause_within(error) is None


def test_an_attribute_named_like_that_of_wrapped_errors_may_be_anything() -> None:
    class Odd(Exception):
        @property
        def inner_exception(self) -> object:
            raise ValueError("not now")

    class Worded(Exception):
        inner_exception = "a text"

    given = Exception("given")
    given.inner_exception = 3  # type: ignore[attr-defined]
    for error in (Odd("odd"), Worded("worded"), given):
        assert cause_within(error) == "build"
        assert (class_name(error), first_line(error)) == (type(error).__name__, str(error))


def test_what_a_hook_of_the_users_raises_is_no_fault_of_the_kernel() -> None:
    """Triton's launcher calls hooks; whatever else is raised beneath it is about the kernel."""

    def mine(*args: object) -> None:
        raise ValueError("mine")

    hooks = HookChain()
    hooks.add(mine)
    driver = {"__name__": "triton.backends.nvidia.driver"}
    exec("def launch(called): called()", driver)
    for called, cause in ((hooks, None), (mine, "build")):
        with pytest.raises(ValueError, match="mine") as caught:
            driver["launch"](called)  # type: ignore[operator]
        assert cause_of(caught.value) == cause
        assert cause_within(caught.value) == cause
