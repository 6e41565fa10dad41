"""Every attention kernel compiled for every target with the tile that the optimizer chose: what fits, what spills.

Nothing here needs a GPU. A cell that no tile takes says why and which kernel of the chain takes the call instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tcport.device import catalogue_profile
from tcport.device.profile import DeviceProfile
from tcport.errors import ArgumentError, KernelBuildError, NoTileError, OutOfResourcesError
from tcport.kernels.hopper_prefill import SMALLEST_BOX, box_keys
from tcport.tiling.fit import RUN_TIME_STEPS, fit
from tcport.tiling.footprint import ENTRIES, compile_target
from tcport.tiling.hopper import rank_hopper_tiles
from tcport.tiling.limits import limits_of
from tcport.tiling.optimizer import rank_tiles
from tcport.tiling.plan import plain_spec
from tcport.tiling.workers import OutOfTimeError, one_worker

# CUDA C++ Programming Guide, technical specifications of compute capability 8.6; no card of it is in the catalogue.
_SM_86 = DeviceProfile(
    vendor="nvidia", arch="sm_86", name="compute capability 8.6", warp_width=32, max_threads_per_cta=1024,
    max_threads_per_unit=1536, registers_per_unit=65536, max_registers_per_thread=255, shared_per_cta=48 << 10,
    shared_per_cta_optin=99 << 10, shared_per_unit=100 << 10, mma_atom="mma.sync", async_copy="cp.async",
    flags={"bf16": True, "fp8": False},
)  # fmt: skip

DEVICES = {
    "sm_75": "t4", "sm_80": "a100", "sm_86": "", "sm_89": "l40s", "sm_90": "h200", "sm_100": "b200",
    "sm_120": "rtx_pro_6000", "gfx90a": "mi250x", "gfx942": "mi300x", "gfx950": "mi355x", "gfx1100": "rx7900xtx",
    "gfx1151": "gfx1151", "gfx1201": "rx9070xt",
}  # fmt: skip
"""Target -> the device of the catalogue that stands for it."""
DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
DIMS = (64, 80, 96, 128, 192, 256, 512)
PAGES = (1, 16, 64, 256, 1056)
KERNELS = ("decode", "prefill")
_FIRST = (("bfloat16", "float16"), (128, 64, 256, 96), (16, 64, 256, 1))
"""Dtypes, head dims and pages that are met most, in order: their cells are compiled first."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One kernel for one target: fp8 is the cache's dtype, beside a query of bfloat16 (float16 on sm_75)."""

    target: str
    kernel: str
    dtype: str
    dim: int
    page: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        tile: the accepted tile; "" when there is none.
        shared, shared_limit: bytes of shared memory of a CTA.
        registers, spill: registers of a thread, and bytes of them that went to memory.
        occupancy: CTAs that one compute unit holds at a time, by shared memory, threads and registers.
        steps: other tiles tried, each with what was wrong.
        exhausted: the tile spills, and no tile that might not is left untried.
        refusal: why no tile is accepted.
    """

    cell: Cell
    tile: str = ""
    shared: int = 0
    shared_limit: int = 0
    registers: int = 0
    spill: int = 0
    threads: int = 0
    occupancy: int = 0
    steps: tuple[str, ...] = ()
    exhausted: bool = False
    refusal: str = ""

    @property
    def over_limit(self) -> bool:
        return self.shared > self.shared_limit

    @property
    def instead(self) -> str:
        """What takes the call that no tile takes: the next kernel of the chain."""
        if not self.refusal:
            return ""
        return "triton_prefill" if self.cell.kernel == "hopper_prefill" else "torch_attention"

    def to_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "cell"}
        return {**dataclasses.asdict(self.cell), **own, "instead": self.instead}


def cells(
    targets: Sequence[str] = tuple(DEVICES),
    dtypes: Sequence[str] = DTYPES,
    dims: Sequence[int] = DIMS,
    pages: Sequence[int] = PAGES,
) -> list[Cell]:
    """The cells of a matrix: the plain kernels everywhere, the one for Hopper where it takes the call.

    Those that are met most come first.

    Raises:
        ArgumentError: a target that is not in :data:`DEVICES`.
    """
    unknown = [target for target in targets if target not in DEVICES]
    if unknown:
        raise ArgumentError(f"The matrix has no target {unknown[0]!r}.", f"Choose from {', '.join(DEVICES)}.")
    plain = [Cell(*row) for row in itertools.product(targets, KERNELS, dtypes, dims, pages)]
    own = itertools.product(targets, ("hopper_prefill",), dtypes, dims, pages)
    return sorted(plain + [cell for cell in itertools.starmap(Cell, own) if _for_hopper(cell)], key=_place_in_line)


def _place_in_line(cell: Cell) -> int:
    places = zip(_FIRST, (cell.dtype, cell.dim, cell.page), strict=True)
    return sum(usual.index(value) if value in usual else len(usual) for usual, value in places)


def _for_hopper(cell: Cell) -> bool:
    """Whether the kernel for Hopper takes such a call (``lowering/hopper.py``)."""
    return (
        cell.target == "sm_90"
        and cell.dtype in ("float16", "bfloat16")
        and cell.dim in (64, 128, 256)
        and box_keys(cell.page, 64) >= SMALLEST_BOX
    )


def run(
    todo: Sequence[Cell],
    jobs: int,
    done: Callable[[Outcome], None] = lambda outcome: None,
    seconds: float = 86400.0,
) -> list[Outcome]:
    """Plan and compile cells, each of ``jobs`` threads with a compiler process of its own.

    First as a chain does at run time; then, for tiles that spill, until one does not or none is left that might not.
    What a compiler said is kept on disk, so that a run which is stopped, or out of time, goes on where it was.

    Args:
        done: is told of each cell as it ends, and once more where it was gone into again.
        seconds: what is not compiled after this time is left.

    Returns:
        Outcomes in the order of ``todo``; cells that were not compiled are missing.
    """
    end = time.monotonic() + seconds
    outcomes: dict[Cell, Outcome] = {}
    lock = threading.Lock()

    def serve(queue: Iterator[Cell], spill_steps: int | None) -> None:
        with contextlib.suppress(OutOfTimeError), one_worker(end):
            while time.monotonic() < end:
                with lock:
                    cell = next(queue, None)
                if cell is None:
                    return
                outcome = compile_cell(cell, spill_steps)
                with lock:
                    outcomes[cell] = outcome
                    done(outcome)

    with ThreadPoolExecutor(jobs) as pool:
        for spill_steps in (RUN_TIME_STEPS, None):
            cells_left = [cell for cell in todo if cell not in outcomes or _open(outcomes[cell])]
            queue = iter(cells_left)
            list(pool.map(lambda _: serve(queue, spill_steps), range(min(jobs, len(cells_left)))))  # noqa: B023
    return [outcomes[cell] for cell in todo if cell in outcomes]


def _open(outcome: Outcome) -> bool:
    """Whether a tile that does not spill may still be found."""
    return outcome.spill > 0 and not outcome.exhausted


def compile_cell(cell: Cell, spill_steps: int | None = None) -> Outcome:
    """The tile of one cell, and what it takes; ``spill_steps`` as for :func:`tcport.tiling.fit.fit`."""
    profile = profile_of(cell.target)
    half = "float16" if cell.target == "sm_75" else "bfloat16"
    spec = plain_spec(
        num_q_heads=32,
        num_kv_heads=8,
        dim_qk=cell.dim,
        dim_v=cell.dim,
        page=cell.page,
        batch=16,
        context=8192,
        tokens=None if cell.kernel == "decode" else 16 * 512,
        dtype=half if cell.dtype.startswith("float8") else cell.dtype,
        kv_dtype=cell.dtype,
    )
    if compile_target(profile) is None:
        return Outcome(cell, refusal=f"Triton here has no compiler for {cell.target}")
    try:
        ranking = rank_hopper_tiles(spec, profile) if cell.kernel == "hopper_prefill" else rank_tiles(spec, profile)
        accepted = fit(spec, profile, ranking, ENTRIES[cell.kernel], spill_steps=spill_steps)
    except NoTileError as error:
        return Outcome(cell, refusal=error.cause)
    except (OutOfResourcesError, KernelBuildError) as error:
        return Outcome(cell, refusal=str(error))
    limits = limits_of(profile)
    widest = max(accepted.compiled.footprints, key=lambda footprint: footprint.shared)
    by_each = (
        limits.shared_per_unit // max(1, widest.shared),
        limits.threads_per_unit // widest.threads,
        limits.registers_per_unit // max(1, widest.registers * widest.threads),
    )
    return Outcome(
        cell,
        tile=str(accepted.config),
        shared=widest.shared,
        shared_limit=limits.shared_per_cta,
        registers=widest.registers,
        spill=accepted.compiled.spill,
        threads=widest.threads,
        occupancy=min(by_each),
        steps=tuple(f"{config}: {why}" for config, why in accepted.steps),
        exhausted=accepted.exhausted,
    )


def profile_of(target: str) -> DeviceProfile:
    """The device that stands for a target."""
    return catalogue_profile(DEVICES[target]) if DEVICES[target] else _SM_86
