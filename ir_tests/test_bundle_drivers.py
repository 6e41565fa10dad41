"""What the drivers of CUDA and HIP are told to load and launch, and what becomes of their refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from tcport.bundle import cuda_driver, hip_driver
from tcport.bundle.launch import pack
from tcport.errors import BundleError, KernelLaunchError
from tcport.failures import cause_of


@dataclasses.dataclass
class FakeCode:
    value: int = 0
    name: str = "OK"


class FakeDriver(types.SimpleNamespace):
    """Answers like cuda-python and hip-python: a tuple that starts with a code. ``failing`` names a call that fails."""

    def __init__(self, failing: str = "") -> None:
        super().__init__(CUresult=types.SimpleNamespace(CUDA_SUCCESS=FakeCode()), calls={})
        self.CUfunction_attribute = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic shared"
        )
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            self.calls[name] = (args, kwargs)
            code = FakeCode(1, "REFUSED") if name == self.failing else FakeCode()
            return (code,) if "Launch" in name or "Set" in name else (code, f"result of {name}")

        return call


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=77))


@pytest.mark.usefixtures("stream")
def test_what_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    launch = cuda_driver.load(b"code", "attend", 100_000, 128)
    assert driver.calls["cuFuncSetAttribute"][0] == ("result of cuKernelGetFunction", "dynamic shared", 100_000)
    x = torch.zeros(4)
    numbers, kinds = pack([x, 7, 0.5], ["*fp32", "i32", "fp32"], hidden=2)
    assert numbers == (x.data_ptr(), 7, 0.5, 0, 0)
    launch((3, 2, 1), numbers, kinds, "cuda:0")
    assert driver.calls["cuLaunchKernel"][0] == (
        "result of cuKernelGetFunction", 3, 2, 1, 128, 1, 1, 100_000, 77, (numbers, kinds), 0,
    )  # fmt: skip
    assert [kind.__name__ for kind in kinds] == ["c_void_p", "c_int", "c_float", "c_void_p", "c_void_p"]


@pytest.mark.usefixtures("stream")
def test_what_hip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(hip_driver, "_hip", lambda: driver)
    launch = hip_driver.load(b"code", "attend", 4096, 256)
    launch((3, 2, 1), *pack([5, 0.5], ["i64", "fp32"], hidden=1), "cuda:0")
    args, kwargs = driver.calls["hipModuleLaunchKernel"]
    assert args == ("result of hipModuleGetFunction", 3, 2, 1, 256, 1, 1)
    assert (kwargs["sharedMemBytes"], kwargs["stream"]) == (4096, 77)
    assert [argument.value for argument in kwargs["extra"]] == [5, 0.5, None]


@pytest.mark.usefixtures("stream")
def test_what_the_driver_refuses_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for failing, load in (("cuLibraryLoadData", cuda_driver), ("hipModuleLoadData", hip_driver)):
        monkeypatch.setattr(load, "_driver" if load is cuda_driver else "_hip", lambda f=failing: FakeDriver(f))
        with pytest.raises(BundleError, match=f"{failing} of attend failed: REFUSED"):
            load.load(b"", "attend", 0, 32)
        absent = types.SimpleNamespace(**{failing: _no_library})
        monkeypatch.setattr(load, "_driver" if load is cuda_driver else "_hip", lambda absent=absent: absent)
        with pytest.raises(BundleError, match="cannot be used .libcuda"):
            load.load(b"", "attend", 0, 32)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: FakeDriver("cuLaunchKernel"))
    with pytest.raises(KernelLaunchError, match="failed: REFUSED"):
        cuda_driver.load(b"", "attend", 0, 32)((1, 1, 1), (), (), "cuda:0")


def _no_library(*args: Any) -> None:
    raise RuntimeError("libcuda.so.1 was not found")


def test_absent_packages_are_a_reason_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.setitem(sys.modules, "hip", None)
    for load in (cuda_driver.load, hip_driver.load):
        with pytest.raises(BundleError, match="pip install 'tcport") as caught:
            load(b"", "attend", 0, 32)
        assert cause_of(caught.value) == "unavailable"
