"""The chain of ``tcport::write_and_attend``: a kernel of ``kv_write``, then one of ``paged_attention``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tcport.device import DeviceProfile
from tcport.kernels.call import Launcher, WriteAndAttendCall
from tcport.lowering.candidate import Candidate, Selection
from tcport.lowering.registry import select
from tcport.lowering.spec import WriteAndAttendSpec


def select_both(spec: WriteAndAttendSpec, profile: DeviceProfile, *, kernel: str | None = None) -> Selection:
    """Pairs of kernels, best first: each attention kernel behind the best write, and last the two plain PyTorch ones.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    writes = select("kv_write", spec.write, profile, kernel=kernel)
    attends = select("paged_attention", spec.attend, profile, kernel=kernel)
    pairs = tuple(_pairs(writes.candidates, attends.candidates))
    return Selection(pairs, writes.rejections + attends.rejections)


def _pairs(writes: tuple[Candidate, ...], attends: tuple[Candidate, ...]) -> Iterator[Candidate]:
    for attend in attends:
        # A link that needs no compiler must not get a write that does, so that the last one has nothing left to fail.
        able = [write for write in writes if attend.needs_compiler or not write.needs_compiler] or [writes[-1]]
        write = able[-1] if attend.tier == "torch" else able[0]
        yield Candidate(
            f"{write.kernel}+{attend.kernel}",
            write.tier if attend.tier == "torch" else attend.tier,
            _run(write, attend),
            attend.config,
            attend.why,
            attend.options,
            loaded=write.loaded and attend.loaded,
            source=f"{write.source} {attend.source}",
        )


def _run(write: Candidate, attend: Candidate) -> Any:
    def run(call: WriteAndAttendCall, launch: Launcher) -> Any:
        write.run(call.write, launch)
        return attend.run(call.attend, launch)

    return run
