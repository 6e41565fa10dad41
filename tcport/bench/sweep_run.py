"""A sweep as one run: compilers on all cores, GPUs that time the shapes whose kernels are there, a file for each shape.

A run that is stopped keeps the shapes it has, and another in the same folder goes on from there.
"""

from __future__ import annotations

import concurrent.futures as futures
import dataclasses
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from tcport.bench.cases import Case
from tcport.bench.sweep import Sweep, entry_of, meta_call, tiles_of, time_tiles
from tcport.device import DeviceProfile
from tcport.errors import ArgumentError
from tcport.ir import TileConfig
from tcport.kernels.offline import compile_ahead, record
from tcport.kernels.target import targeting
from tcport.tiling.footprint import compile_target

Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """One shape to time, and where its times go."""

    case: Case
    tiles: tuple[TileConfig, ...]
    file: Path

    def kernels(self) -> dict[Key, tuple[Case, TileConfig]]:
        """What is compiled for it: one entry for each set of constants, whatever the batch and the lengths."""
        case = self.case
        constants = (case.q_lens is None, case.heads, case.dims, case.page, case.dtype, case.kv_dtype)
        few = [
            dataclasses.replace(tile, num_splits=min(2, int(tile.num_splits)), parts=min(2, int(tile.parts)))
            for tile in self.tiles
        ]
        return {(*constants, tile): (case, tile) for tile in few}


def jobs_for(cases: Sequence[Case], profile: DeviceProfile, folder: Path) -> list[Job]:
    """Every tile of each case; those that take longest to time come first."""
    jobs = [Job(case, tuple(tiles_of(case, profile)), folder / file_name(case)) for case in cases]
    return sorted(jobs, key=lambda job: (job.case.q_lens is None, job.case.kind != "prefill"))


def jobs_to_confirm(sweeps: Sequence[Sweep], profile: DeviceProfile, folder: Path, best: int = 4) -> list[Job]:
    """The optimizer's first choice of today beside the fastest tiles of an earlier sweep."""
    jobs = []
    for each in sweeps:
        fastest = sorted(each.timings, key=lambda timing: timing.microseconds)[:best]
        first = tiles_of(each.case, profile)[0]
        tiles = dict.fromkeys([first, *(timing.tile for timing in fastest)])
        jobs.append(Job(each.case, tuple(tiles), folder / file_name(each.case)))
    return jobs


def file_name(case: Case) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in case.name) + ".json"


def run(
    jobs: Sequence[Job],
    compilers: int,
    gpus: Sequence[int],
    target: GPUTarget,
    *,
    seconds: float = 86400.0,
    timed: Callable[[Job, int], Sweep] | None = None,
    told: Callable[[Job, Sweep | str], None] = lambda job, outcome: None,
) -> None:
    """Compile and time jobs; those whose file is there are left out.

    Args:
        compilers: processes that compile.
        gpus: CUDA devices that time, each in a process of its own.
        seconds: no shape is begun after this time.
        timed: what a timing process does with a job and its GPU; None: time its tiles there.
        told: hears of every shape as it ends: its times, or what went wrong.
    """
    end = time.monotonic() + seconds
    todo = [job for job in jobs if not job.file.is_file()]
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(compilers, context, initializer=_one_thread) as pool:
        pending: dict[Key, futures.Future[None]] = {}
        for job in todo:
            for key, (case, tile) in job.kernels().items():
                if key not in pending:
                    pending[key] = pool.submit(_compile, case, tile, target)
        queue, lock = iter(todo), threading.Lock()

        def serve(gpu: int) -> None:
            timing = futures.ProcessPoolExecutor(1, context, initializer=_one_thread)
            while True:
                with lock:
                    job = next(queue, None)
                if job is None or time.monotonic() > end:
                    break
                # A kernel that does not compile is met again, and reported, where it is timed.
                futures.wait([pending[key] for key in job.kernels()], timeout=max(0.0, end - time.monotonic()))
                try:
                    outcome: Sweep | str = timing.submit(timed or _on_gpu, job, gpu).result()
                    _write(job.file, outcome)
                except Exception as error:  # noqa: BLE001 - told; a process that died must not end the others' work
                    outcome = f"{type(error).__name__}: {error}"
                    timing.shutdown(wait=False)
                    timing = futures.ProcessPoolExecutor(1, context, initializer=_one_thread)
                with lock:
                    told(job, outcome)
            timing.shutdown()

        with futures.ThreadPoolExecutor(len(gpus)) as threads:
            list(threads.map(serve, gpus))
        pool.shutdown(cancel_futures=True)


def read(folder: Path) -> list[Sweep]:
    """The sweeps of a folder, by name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))]
    return [Sweep.from_dict(json.loads(text)) for text in texts]


def target_of(profile: DeviceProfile) -> GPUTarget:
    """What Triton compiles for on a device that is present."""
    target = compile_target(profile)
    if target is None:
        raise ArgumentError(f"Triton here has no compiler for {profile.arch}.", "Sweep on a GPU that it compiles for.")
    return GPUTarget(*target)


def _on_gpu(job: Job, gpu: int) -> Sweep:
    torch.cuda.set_device(gpu)
    torch.cuda.empty_cache()
    return time_tiles(job.case, job.tiles)


def _write(file: Path, done: Sweep) -> None:
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(done.to_dict()) + "\n", encoding="utf-8")
    os.replace(scratch, file)


def _compile(case: Case, tile: TileConfig, target: GPUTarget) -> None:
    with targeting(target):
        launches = record(entry_of(case), meta_call(case), tile)
    for launch in launches:
        compile_ahead(launch, target)


def _one_thread() -> None:
    torch.set_num_threads(1)
