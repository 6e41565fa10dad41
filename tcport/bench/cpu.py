"""Attention on the CPU beside what else computes it, and beside the memory's own speed: ``python -m tcport.bench.cpu``.

All rows of a table are measured in turn, round after round, so that other work on the machine meets each of them alike,
and each after a read of other memory, so that none finds its own in a cache; printed are medians. Rates count the bytes
of K and V that a call has to read (or to write), no matter how often it really does.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tcport import eager, ops  # noqa: F401  (eager binds the operators)
from tcport.bench.flex import flex_decode
from tcport.device import device_profile
from tcport.errors import KernelBuildError
from tcport.kernels import cpu_library
from tcport.lowering.operators import PAGED_ATTENTION
from tcport.lowering.registry import select

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
READ = "read memory"
WASH = 128 << 20
"""Bytes, more than the caches of a processor hold."""


def main() -> None:
    """Print every table."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {machine()}; load before: {load()}")
    for dtype in (torch.float32, torch.bfloat16):
        decode(dtype)
    threads()
    for dtype in (torch.float32, torch.bfloat16):
        prefill(dtype)
    write()
    print(f"\nload after: {load()}")


def decode(dtype: torch.dtype) -> None:
    """One token per sequence: 8 x 2048 keys, a ragged batch of 16, and one sequence of 32768.

    Every row is compared with a plain read of the caches that it reads itself: short ones are read at a lower rate than
    long ones by anything.
    """
    ragged = [int(32 * 256 ** (i / 15)) for i in range(16)]  # log-uniform from 32 to 8192
    runs: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    reading: dict[str, dict[str, Callable[[], object]]] = {}
    for case, lens, head_major in (
        ("head-major", [2048] * 8, True),
        ("page-major", [2048] * 8, False),
        ("ragged, head-major", ragged, True),
        ("1 x 32768, head-major", [32768], True),
    ):
        arguments = query, k, v, table, _ = batch(lens, dtype, head_major)
        rows: dict[str, Callable[[], object]] = {case: lambda a=arguments: ops.paged_attention(*a)}
        if case == "head-major":
            rows["head-major, kernel alone"] = kernel_alone(*arguments)
            rows["gather + SDPA"] = lambda a=(query, k, v, table): gathered(*a)
            rows["FlexAttention, compiled"] = flex_decode(*arguments)
            dense = [c[table].flatten(1, 2).transpose(1, 2).contiguous() for c in (k, v)]
            rows["SDPA, dense KV"] = lambda q=query, kv=dense: sdpa(q[:, :, None], kv[0], kv[1])
        runs |= rows
        sizes |= dict.fromkeys(rows, kv_bytes(lens, dtype))
        reading |= dict.fromkeys(rows, plain := {f"{name} of {case}": read for name, read in reads(k, v).items()})
        runs |= plain
    times = medians(runs)
    best = {row: min(times[name] for name in plain) for row, plain in reading.items()}
    shown = {row: f"{size / times[row] / 1e9:6.1f} of {size / best[row] / 1e9:.1f} GB/s" for row, size in sizes.items()}
    table_of(f"decode, {dtype}", shown, {row: best[row] / times[row] for row in sizes}, READ)


def kernel_alone(*arguments: Tensor) -> Callable[[], object]:
    """The C++ operator, chosen and called as compiled graphs do: nothing is checked, and no Python runs before it."""
    call = PAGED_ATTENTION.call(*arguments)
    choice = select("paged_attention", PAGED_ATTENTION.spec(call), device_profile("cpu"))
    return lambda: choice.candidates[0].run(call, lambda kernel: kernel)


def threads() -> None:
    """One sequence of 32768 keys, which threads can only share by its keys."""
    arguments = batch([32768], torch.float32, head_major=True)
    most = torch.get_num_threads()

    def attend(count: int) -> None:
        torch.set_num_threads(count)
        ops.paged_attention(*arguments)
        torch.set_num_threads(most)

    names = {f"{count} threads": count for count in sorted({1, most})}
    times = medians({name: lambda count=count: attend(count) for name, count in names.items()})
    rates = {name: kv_bytes([32768], torch.float32) / seconds / 1e9 for name, seconds in times.items()}
    shown = {name: f"{rate:6.1f} GB/s" for name, rate in rates.items()}
    table_of("decode 1 x 32768, fp32", shown, rates, "1 threads")


def prefill(dtype: torch.dtype) -> None:
    """4 prompts of 1024 tokens, causal."""
    _, k, v, table, seq_lens = batch([1024] * 4, dtype, head_major=True)
    packed = torch.randn(4 * 1024, HEADS, DIM).to(dtype)
    query = packed.unflatten(0, (4, 1024)).transpose(1, 2)
    starts = torch.arange(5) * 1024
    dense = [c[table].flatten(1, 2).transpose(1, 2).contiguous() for c in (k, v)]
    runs = {
        "paged_attention": lambda: ops.paged_attention(packed, k, v, table, seq_lens, starts),
        "SDPA, dense KV": lambda: sdpa(query, *dense, is_causal=True),
    }
    times = medians(runs, rounds=5)
    speed = {name: 1 / seconds for name, seconds in times.items()}
    shown = {name: f"{seconds * 1e3:6.0f} ms" for name, seconds in times.items()}
    table_of(f"prefill 4 x 1024, {dtype}", shown, speed, "SDPA, dense KV")


def write() -> None:
    """8192 new tokens into pages in random order."""
    tokens = 8192
    key, value = torch.randn(2, tokens, KV_HEADS, DIM)
    slots = torch.randperm(tokens)
    runs: dict[str, Callable[[], object]] = {}
    for name, head_major in (("page-major", False), ("head-major", True)):
        k, v = (cache(tokens // PAGE, torch.float32, head_major) for _ in range(2))
        runs[name] = lambda a=(key, value, k, v, slots): ops.kv_write(*a)
    both = torch.stack([key, value])
    target = torch.empty_like(both)
    runs["copy"] = lambda: target.copy_(both)
    rates = {name: both.nbytes / seconds / 1e9 for name, seconds in medians(runs).items()}
    table_of("kv_write, fp32", {name: f"{rate:6.1f} GB/s" for name, rate in rates.items()}, rates, "copy")


def reads(k_cache: Tensor, v_cache: Tensor) -> dict[str, Callable[[], object]]:
    """Ways of reading caches once, from end to end. The fastest is taken for what the memory can do.

    Both keep up with a loop of AVX-512 loads and prefetches; a sum of integers or of rows by a vector does not.
    """
    caches = [cache.as_strided((cache.numel(),), (1,)) for cache in (k_cache, v_cache)]
    doubles, floats = ([cache.view(kind) for cache in caches] for kind in (torch.float64, torch.float32))
    return {
        "sum of doubles": lambda: [cache.sum() for cache in doubles],
        "maximum of floats": lambda: [cache.amax() for cache in floats],
    }


def batch(lens: Sequence[int], dtype: torch.dtype, head_major: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, caches, table and lengths; pages in random order."""
    counts = [-(-length // PAGE) for length in lens]
    order = torch.randperm(sum(counts)).int()
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, part in zip(table, order.split(counts), strict=True):
        row[: len(part)] = part
    query = torch.randn(len(lens), HEADS, DIM).to(dtype)
    k, v = (cache(sum(counts), dtype, head_major) for _ in range(2))
    return query, k, v, table, torch.tensor(lens)


def cache(pages: int, dtype: torch.dtype, head_major: bool) -> Tensor:
    """``[pages, page, KV heads, dim]``, filled."""
    shape = (pages, KV_HEADS, PAGE, DIM) if head_major else (pages, PAGE, KV_HEADS, DIM)
    filled = torch.randn(shape).to(dtype)
    return filled.transpose(1, 2) if head_major else filled


def kv_bytes(lens: Sequence[int], dtype: torch.dtype) -> int:
    return 2 * sum(lens) * KV_HEADS * DIM * dtype.itemsize


def gathered(query: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """What a model without paged attention does."""
    key, value = (c[table].flatten(1, 2).transpose(1, 2) for c in (k, v))
    return sdpa(query[:, :, None], key, value)


def sdpa(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


def medians(runs: Mapping[str, Callable[[], object]], rounds: int = 11) -> dict[str, float]:
    """Seconds per run, each the median over rounds in which every run had its turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    washing = torch.ones(WASH // 4)  # zeros would have no memory of their own to read
    for number in range(rounds + 1):
        for name, run in runs.items():
            washing.sum()
            start = time.perf_counter()
            run()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def table_of(title: str, shown: Mapping[str, str], rates: Mapping[str, float], unit: str) -> None:
    """Print what was measured, and how it compares with one of the rows; without that row, rates are shares already."""
    print(f"\n{title:32}{'':21}of {unit}", flush=True)
    for name, text in shown.items():
        print(f"  {name:30}{text:>21}{rates[name] / rates.get(unit, 1.0):10.2f}", flush=True)


def machine() -> str:
    """The processor, and the instruction set of the kernels."""
    try:
        kernels = cpu_library.load().isa
    except KernelBuildError as error:
        kernels = f"no C++ kernels: {error}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {kernels}"


def load() -> str:
    """Processes that wanted to run in the last 1, 5 and 15 minutes."""
    return ", ".join(f"{x:.1f}" for x in os.getloadavg())


if __name__ == "__main__":
    with torch.inference_mode():
        main()
