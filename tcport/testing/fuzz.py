"""Random batches against the fp64 reference: ``python -m tcport.testing.fuzz --examples 2000 --jobs 8``.

Every batch goes to the kernel that the lowering chooses for it on the device, at its first choice, with poison around
every live byte. A failure prints the smallest batch that shows it. Most batches need a kernel of their own: the time
goes into compiling, which is why several processes share the work.
"""

from __future__ import annotations

import collections
import multiprocessing
import sys
import time
from typing import Annotated

import hypothesis
import torch
import typer

from tcport.device import device_profile
from tcport.kernels.call import AttentionCall
from tcport.lowering.operators import PAGED_ATTENTION, choose
from tcport.testing.strategies import paged_batches

CHUNK = 50
"""Batches that one process tries before it reports."""

DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(
    examples: Annotated[int, typer.Option(min=1, help="Batches to try in all.")] = 2000,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to share them.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed tries the same batches.")] = 0,
    device: Annotated[str, typer.Option(help="Where the batches run.")] = DEFAULT_DEVICE,
    shrink: Annotated[bool, typer.Option(help="Look for the smallest batch behind a failure.")] = True,
    seconds: Annotated[float, typer.Option(help="Start nothing new after so long.")] = float("inf"),
) -> None:
    """Try random batches on a device; exits 1 when one is wrong."""
    started = time.perf_counter()
    chunk = max(1, min(CHUNK, examples // jobs))
    tasks = [(min(chunk, examples - start), seed + start, device, shrink) for start in range(0, examples, chunk)]
    kernels: collections.Counter[str] = collections.Counter()
    failures = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for tried, failure in pool.imap_unordered(_fuzz, tasks):
            kernels += tried
            failures += bool(failure)
            print(failure or f"{kernels.total()} of {examples}", flush=True)
            if time.perf_counter() - started > seconds:
                break
    used = ", ".join(f"{name} {count}" for name, count in kernels.most_common())
    print(
        f"{kernels.total()} batches from seed {seed} on {device_profile(device).name}: {failures} failures "
        f"({used}; {time.perf_counter() - started:.0f} s)"
    )
    sys.exit(1 if failures else 0)


def fuzz(examples: int, seed: int, device: str, shrink: bool = True) -> tuple[collections.Counter[str], str]:
    """Try batches in this process.

    Returns:
        How many batches each kernel took, and the first failure with its smallest batch, or ``""``.
    """
    kernels: collections.Counter[str] = collections.Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        print_blob=True,
        phases=[phase for phase in hypothesis.Phase if shrink or phase is not hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @hypothesis.given(batch=paged_batches())
    def check(batch) -> None:  # type: ignore[no-untyped-def]
        batch = batch.to(device)
        call = AttentionCall.of(**batch.arguments, return_lse=True)
        chain = choose(PAGED_ATTENTION, call, device_profile(device)).selection.candidates
        candidate = next(link for link in chain if link.aside(call) is None)
        kernels[candidate.kernel] += 1
        batch.check(*candidate.run(call, lambda kernel: kernel))

    try:
        check()
    except Exception as error:  # noqa: BLE001  (recorded: it is the result)
        notes = "\n".join(getattr(error, "__notes__", []))
        return kernels, f"seed {seed}: {type(error).__name__}: {error}\n{notes}"
    return kernels, ""


def _fuzz(task: tuple[int, int, str, bool]) -> tuple[collections.Counter[str], str]:
    return fuzz(*task)


if __name__ == "__main__":
    typer.run(main)
