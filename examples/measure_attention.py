"""Time the Triton kernels over a range of tiles, beside a kernel that only reads the pages.

    python examples/measure_attention.py decode prefill --out sweep.json

Every time is the median over replays of a CUDA graph that runs through several caches, together larger than the L2
cache, with pages in random order. "bound" is the fastest of a few kernels that load each K and V page of the case
through the block table and do nothing else; time over bound is a ratio that means the same on any machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tcport.ir import TileConfig
from tcport.kernels.call import AttentionCall
from tcport.kernels.triton_decode import paged_decode
from tcport.kernels.triton_prefill import paged_prefill

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
ROTATED_BYTES = 400e6  # several times the L2 cache of any GPU today


@dataclasses.dataclass(frozen=True)
class Work:
    """One case: ``batch`` sequences of ``context`` keys and ``queries`` query tokens each (0: the decode form)."""

    batch: int
    context: int
    queries: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * KV_HEADS * DIM * 2 * 2

    @property
    def flops(self) -> float:
        visible = self.context - (self.queries - 1) / 2
        return 4.0 * self.batch * self.queries * visible * Q_HEADS * DIM


WORK = {
    "decode": [
        *(Work(1, n) for n in (1024, 8192, 32768, 131072)),
        *(Work(8, n) for n in (1024, 2048, 8192, 32768)),
        *(Work(64, n) for n in (1024, 8192)),
    ],
    "prefill": [Work(1, 4096, 4096)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="+", choices=WORK)
    parser.add_argument("--out", type=Path, default=Path("sweep.json"))
    parser.add_argument("--processes", type=int, default=12, help="processes that compile")
    options = parser.parse_args()
    compile_all(options.kinds, options.processes)

    rows: list[dict[str, Any]] = []
    for kind, work in [(name, work) for name in options.kinds for work in WORK[name]]:
        calls = calls_for(work)
        floor = bound(work, calls) if kind == "decode" else None
        found = []
        for config in configs_for(work):
            try:
                found.append((microseconds(attend(config), calls), config))
            except triton.runtime.errors.OutOfResources:
                continue
        found.sort(key=lambda pair: pair[0])
        rows += [
            {"kind": kind, **dataclasses.asdict(work), "us": time, "bound": floor, **dataclasses.asdict(config)}
            for time, config in found
        ]
        best, config = found[0]
        rate = f"{best / floor:.2f} x bound {floor:.1f}" if floor else f"{work.flops / best / 1e6:.0f} TFLOP/s"
        print(f"{kind} {work.batch} x {work.context}: {best:.1f} us, {rate}, {config}; then", end=" ")
        print("; ".join(f"{time:.1f} {config}" for time, config in found[1:4]), flush=True)
        options.out.write_text(json.dumps(rows))
        del calls


def calls_for(work: Work) -> list[AttentionCall]:
    """The same case over several caches, so that the L2 holds nothing of the next one."""
    rotations = max(1, min(16, round(ROTATED_BYTES / work.kv_bytes + 0.5)))
    pages = work.batch * (work.context // PAGE)
    tokens = work.batch * max(1, work.queries)
    calls = []
    for _ in range(rotations):
        cache = torch.randn(2, pages, PAGE, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(pages, device="cuda").view(work.batch, -1).int()
        lens = torch.full((work.batch,), work.context, device="cuda", dtype=torch.int32)
        starts = None
        if work.queries:
            starts = torch.arange(0, tokens + 1, work.queries, device="cuda", dtype=torch.int32)
        query = torch.randn(tokens, Q_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        calls.append(AttentionCall.of(query, cache[0], cache[1], table, lens, starts))
    return calls


def microseconds(run: Callable[[AttentionCall], Any], calls: list[AttentionCall], replays: int = 7) -> float:
    """Median time of one call, from replays of a graph that goes through all of them."""
    run(calls[0])
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for call in calls * repeats:
            run(call)
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events]
    return statistics.median(times) * 1e3 / (len(calls) * repeats)


def attend(config: TileConfig) -> Callable[[AttentionCall], Any]:
    def run(call: AttentionCall) -> Any:
        entry = paged_decode if call.cu_seqlens_q is None else paged_prefill
        return entry(call, config, lambda kernel: kernel)

    return run


def configs_for(work: Work) -> Iterable[TileConfig]:
    if work.queries:
        for rows, block, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
            yield TileConfig(rows, block, warps, stages)
        return
    two_per_sm = -(-2 * _sms() // (work.batch * KV_HEADS))
    for block, warps, stages in itertools.product((16, 32, 64, 128), (1, 2, 4), (2, 3, 4)):
        most = max(1, work.context // block)
        for splits in sorted({max(1, min(most, int(two_per_sm * x))) for x in (0.5, 1, 2, 3)}):
            yield TileConfig(16, block, warps, stages, splits)


@triton.jit
def read_pages(
    k_cache, v_cache, block_table, seq_lens, out, table_stride, splits, HEADS: tl.constexpr, D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load every K and V element of a sequence's pages, and use them for a sum that nobody wants."""
    seq, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    tiles = tl.cdiv(tl.load(seq_lens + seq), BLOCK_N)
    total = tl.zeros([BLOCK_N, D], tl.float32)
    for tile in range(tl.program_id(1) * tiles // splits, (tl.program_id(1) + 1) * tiles // splits):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(block_table + seq * table_stride + key // PAGE_SIZE).to(tl.int64)
        token = (page * PAGE_SIZE + key % PAGE_SIZE) * (HEADS * D) + head * D
        at = token[:, None] + tl.arange(0, D)[None, :]
        total += tl.load(k_cache + at).to(tl.float32) + tl.load(v_cache + at).to(tl.float32)
    tl.store(out + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)), tl.sum(tl.sum(total, 1), 0))


def bound(work: Work, calls: list[AttentionCall]) -> float:
    """Fastest of several ways to read every page once."""
    best = float("inf")
    for block, warps, per_sm in itertools.product((32, 64), (2, 4, 8), (2, 4, 8)):
        splits = max(1, min(work.context // block, _sms() * per_sm // (work.batch * KV_HEADS)))

        def run(call: AttentionCall, block: int = block, warps: int = warps, splits: int = splits) -> None:
            out = torch.empty(work.batch * KV_HEADS * splits, device="cuda")
            read_pages[(work.batch * KV_HEADS, splits)](
                call.k_cache, call.v_cache, call.block_table, call.seq_lens, out, call.block_table.stride(0), splits,
                KV_HEADS, DIM, PAGE, block, num_warps=warps, num_stages=4,  # type: ignore[call-arg]
            )  # fmt: skip

        best = min(best, microseconds(run, calls, 5))
    return best


def compile_all(kinds: list[str], processes: int) -> None:
    """Fill Triton's cache from several processes: compiling is most of a sweep's time."""
    works = [work for kind in kinds for work in WORK[kind]]
    jobs = {
        (work.queries > 0, dataclasses.replace(config, num_splits=min(2, config.num_splits)))
        for work in works
        for config in configs_for(work)
    }
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(_compile_one, sorted(jobs, key=str), chunksize=1)


def _compile_one(job: tuple[bool, TileConfig]) -> None:
    prefill, config = job
    try:
        attend(config)(calls_for(Work(2, 64, 64 if prefill else 0))[0])
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources:
        pass  # left out of the table when it is timed


def _sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


if __name__ == "__main__":
    main()
