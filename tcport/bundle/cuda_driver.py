"""Loading and launching a cubin through cuda-python: no Triton, no C compiler, no cache folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tcport.errors import BundleError, KernelLaunchError

_DEFAULT_SHARED = 48 * 1024  # what a kernel may have without asking; CUDA C++ Programming Guide, compute capabilities


def load(data: bytes, symbol: str, shared: int, threads: int) -> Callable[..., None]:
    """A function that launches ``symbol`` of a cubin on the current device.

    Raises:
        BundleError: cuda-python is absent, or the driver refuses the binary.
    """
    driver = _driver()
    try:
        answer = driver.cuLibraryLoadData(data, [], [], 0, [], [], 0)
    except RuntimeError as error:  # cuda-python looks for libcuda at its first call
        raise BundleError(f"The CUDA driver cannot be used ({error}).", "Install the display driver.") from error
    library = _taken(answer, "cuLibraryLoadData", symbol)
    kernel = _taken(driver.cuLibraryGetKernel(library, symbol.encode()), "cuLibraryGetKernel", symbol)
    function = _taken(driver.cuKernelGetFunction(kernel), "cuKernelGetFunction", symbol)
    if shared > _DEFAULT_SHARED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _taken(driver.cuFuncSetAttribute(function, attribute, shared), "cuFuncSetAttribute", symbol)

    def launch(grid: tuple[int, int, int], numbers: tuple[Any, ...], types: tuple[Any, ...], device: Any) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            (code,) = driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, (numbers, types), 0)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise KernelLaunchError(
                f"cuLaunchKernel of {symbol} on a grid of {grid} failed: {code.name}.", "See above."
            )

    # The library owns the code: it lives as long as what launches it.
    launch.library = library  # type: ignore[attr-defined]
    return launch


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BundleError(f"cuda-python is not installed ({error}).", "pip install 'tcport[nvidia]'.") from error


def _taken(answer: tuple[Any, ...], call: str, symbol: str) -> Any:
    """The result of a driver call, whose first part is its error code."""
    code, *results = answer
    if code.value != 0:
        raise BundleError(f"{call} of {symbol} failed: {code.name}.", "Build the bundle for this device and driver.")
    return results[0] if results else None
