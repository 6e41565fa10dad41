"""Loading and launching an hsaco through hip-python: no Triton, no C compiler, no cache folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tcport.errors import BundleError, KernelLaunchError


def load(data: bytes, symbol: str, shared: int, threads: int) -> Callable[..., None]:
    """A function that launches ``symbol`` of an hsaco on the current device.

    Raises:
        BundleError: hip-python is absent, or the runtime refuses the binary.
    """
    hip = _hip()
    try:
        answer = hip.hipModuleLoadData(data)
    except RuntimeError as error:  # hip-python looks for libamdhip64 at its first call
        raise BundleError(f"The HIP runtime cannot be used ({error}).", "Install the ROCm runtime.") from error
    module = _taken(answer, "hipModuleLoadData", symbol)
    function = _taken(hip.hipModuleGetFunction(module, symbol.encode()), "hipModuleGetFunction", symbol)

    def launch(grid: tuple[int, int, int], numbers: tuple[Any, ...], types: tuple[Any, ...], device: Any) -> None:
        extra = tuple(kind(number) for kind, number in zip(types, numbers, strict=True))
        with torch.cuda.device(device):
            (code,) = hip.hipModuleLaunchKernel(
                function, *grid, threads, 1, 1,
                sharedMemBytes=shared,
                stream=torch.cuda.current_stream(device).cuda_stream,
                kernelParams=None,
                extra=extra,
            )  # fmt: skip
        if code.value != 0:
            raise KernelLaunchError(
                f"hipModuleLaunchKernel of {symbol} on a grid of {grid} failed: {code.name}.", "See above."
            )

    launch.module = module  # type: ignore[attr-defined]
    return launch


def _hip() -> Any:
    try:
        from hip import hip
    except (ImportError, RuntimeError) as error:  # RuntimeError: older ones look for libamdhip64 when imported
        raise BundleError(f"hip-python cannot be used ({error}).", "pip install 'tcport[amd]'.") from error
    return hip


def _taken(answer: tuple[Any, ...], call: str, symbol: str) -> Any:
    """The result of a runtime call, whose first part is its error code."""
    code, *results = answer
    if code.value != 0:
        raise BundleError(f"{call} of {symbol} failed: {code.name}.", "Build the bundle for this device and runtime.")
    return results[0] if results else None
