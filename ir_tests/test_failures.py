"""What an exception says about a kernel: which errors another kernel may survive, and which no kernel can."""

from __future__ import annotations

import pytest

from tcport.errors import KernelLaunchError
from tcport.failures import cause_of, raise_if_sticky

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
