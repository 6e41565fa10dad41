"""Checks of the Triton kernel of ``rope_and_write``; ``test_rope_kernel.py`` runs each table in its own process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from subprocess_results import report
from torch import Tensor

from tcport.kernels.call import WriteCall
from tcport.kernels.rope import RopeWriteCall, rotated

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative and absolute: 16 ulps of fp32, 2 of a 16-bit float."""
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SLOTS = (9, -1, 0, 15, 16)
"""Of five tokens: one is padding, one past the last of 16 slots."""


def problem(
    dtype: torch.dtype,
    dim: int,
    interleaved: bool,
    norm: bool,
    strided: bool,
    heads: tuple[int, int] = (4, 2),
    device: str = "cpu",
) -> RopeWriteCall:
    """Five tokens, heads of query and key, 4 pages of 4 slots; ``strided``: parts of one tensor, head-major caches."""
    rng = torch.Generator().manual_seed(dim)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    parts = [heads[0], heads[1], heads[1]]
    query, key, value = (t if strided else t.contiguous() for t in noise(5, sum(parts), dim).split(parts, 1))
    caches = [noise(4, heads[1], 4, dim).transpose(1, 2) if strided else noise(4, 4, heads[1], dim) for _ in "kv"]
    slots = torch.tensor(SLOTS, device=device)
    tables = noise(2, 5, dim // 2 if interleaved else dim)
    weights = noise(2, dim).unbind() if norm else (None, None)
    return RopeWriteCall(
        query, WriteCall(key, value, *caches, slots), *tables.unbind(), *weights, eps=1e-5, interleaved=interleaved
    )


def check(call: RopeWriteCall, run: Callable[[RopeWriteCall], Tensor]) -> None:
    """The result and both caches, against fp64; slots that no token has byte for byte."""
    tolerance = TOLERANCE[call.query.dtype]
    want_query, want_key = rotated(call, torch.float64)
    before = [call.k_cache.clone(), call.v_cache.clone()]
    query = run(call)
    assert query.is_contiguous()
    torch.testing.assert_close(query, want_query, rtol=tolerance, atol=tolerance)
    for cache, old, rows in zip((call.k_cache, call.v_cache), before, (want_key, call.write.value), strict=True):
        want = old.flatten(0, 1).clone()
        for token, slot in enumerate(SLOTS):
            if 0 <= slot < want.shape[0]:
                want[slot] = rows[token]
        torch.testing.assert_close(cache.flatten(0, 1), want, rtol=tolerance, atol=tolerance)
        others = [slot for slot in range(want.shape[0]) if slot not in SLOTS]
        assert torch.equal(cache.flatten(0, 1)[others], want[others])


def interpret(*arguments: object) -> None:
    from tcport.kernels.triton_rope import rope_and_write

    check(problem(*arguments), lambda call: rope_and_write(call, lambda kernel: kernel))  # type: ignore[arg-type]


CASES: dict[str, tuple[Any, ...]] = {
    "halves": (64, False, False, False),
    "halves, norm, strided": (24, False, True, True),
    "pairs": (64, True, False, True),
    "pairs, norm": (24, True, True, False),
    "more heads than a program has": (256, False, True, True, (20, 9)),
}


def interpreted() -> dict[str, Callable[[], None]]:
    return {
        f"{name}, {dtype}": functools.partial(interpret, dtype, *case)
        for name, case in CASES.items()
        for dtype in (torch.float32, torch.float16)
    }


def compile_for(target: str, dtype: torch.dtype, *case: Any, traced: bool = False) -> Any:
    from triton.backends.compiler import GPUTarget

    from tcport.kernels.offline import compile_launch, record
    from tcport.kernels.target import targeting
    from tcport.kernels.triton_rope import rope_and_write

    gpu = GPUTarget(*TARGETS[target])
    with targeting(gpu):
        (launch,) = record(rope_and_write, problem(dtype, *case), traced=traced)  # type: ignore[arg-type]
    assert launch.options.get("launch_pdl", False) == (target == "sm_90" and not traced)
    made = compile_launch(launch, gpu)
    assert made.metadata.shared <= 4096  # what threads exchange
    return made


def it_waits_before_it_reads_or_writes() -> None:
    """``griddepcontrol.wait`` stands before all memory in eager launches; PTX has it from sm_90 on."""
    sizes = (128, False, True, True, (32, 8))
    before, after = compile_for("sm_90", torch.bfloat16, *sizes).asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global" not in before
    assert "st.global" not in before
    assert "griddepcontrol.launch_dependents" not in before
    assert "ld.global" in after
    assert "st.global" in after
    for target, traced in (("sm_80", False), ("sm_90", True)):
        assert "griddepcontrol" not in compile_for(target, torch.bfloat16, *sizes, traced=traced).asm["ptx"]


def compiled() -> dict[str, Callable[[], None]]:
    return {"it waits before it reads or writes": it_waits_before_it_reads_or_writes} | {
        f"{name}, {target}": functools.partial(compile_for, target, dtype, max(128, case[0]), *case[1:])
        for name, case in CASES.items()
        for target, dtype in (("sm_80", torch.float16), ("sm_90", torch.bfloat16), ("gfx942", torch.bfloat16))
    }


TABLES = {"interpreted": interpreted, "compiled": compiled}

if __name__ == "__main__":
    report(TABLES[sys.argv[1]]())
