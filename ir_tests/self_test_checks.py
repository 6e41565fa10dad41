"""The self-tests of the probes in Triton's interpreter: right kernels pass, a wrong one is caught."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from subprocess_results import report

from tcport.kernels import triton_decode
from tcport.probes import FAMILIES, capabilities, self_tests

CPU = torch.device("cpu")


def wrong_kernel_is_caught() -> None:
    right = triton_decode.paged_decode

    def wrong(*args: object) -> object:
        out, lse = right(*args)  # type: ignore[arg-type]
        out[2, 3, 4] += 0.5
        return out, lse

    triton_decode.paged_decode = wrong  # type: ignore[assignment]
    try:
        tests = self_tests.self_tests(CPU, "triton_decode")
        said = outcome_of(next(iter(tests.values())))
    finally:
        triton_decode.paged_decode = right
    assert "wrong numbers: off by 0.5" in said, said


def outcome_of(test: Callable[[], str]) -> str:
    try:
        return test()
    except ValueError as error:
        return str(error)


def all_right() -> None:
    tests = {name: test for kernel in FAMILIES for name, test in self_tests.self_tests(CPU, kernel).items()}
    assert {name.split()[0] for name in tests} == set(FAMILIES) - {"hopper_prefill"}
    assert {name: outcome_of(test) for name, test in tests.items()} == dict.fromkeys(tests, "right")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # numpy on log(0), which is meant
    torch.manual_seed(0)
    self_tests._DTYPE = torch.float16  # the interpreter computes bfloat16 wrongly
    report(
        {
            "right": all_right,
            "wrong": wrong_kernel_is_caught,
            "fp16 dot": lambda: capabilities.CAPABILITIES["fp16_dot"](CPU),
        }
    )
