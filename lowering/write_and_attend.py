"""The chain of ``tcport::write_and_attend``: a kernel of ``kv_write``, then one of ``paged_attention``."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from tcport.device import DeviceProfile
from tcport.kernels.call import Launcher, WriteAndAttendCall
from tcport.lowering.candidate import Candidate, Part, Selection
from tcport.lowering.registry import Kernels, select
from tcport.lowering.spec import WriteAndAttendSpec


def select_both(spec: WriteAndAttendSpec, profile: DeviceProfile, *, kernel: Kernels = None) -> Selection:
    """Pairs of kernels: each attention kernel, best first, behind each write, best first.

    Either half fails by itself, and the pairs without it are left.

    Raises:
        OptionError, NoCandidateError: see :func:`tcport.lowering.registry.select`.
    """
    writes = select("kv_write", spec.write, profile, kernel=kernel)
    attends = select("paged_attention", spec.attend, profile, kernel=kernel)
    pairs = tuple(_pairs(writes.candidates, attends.candidates))
    return Selection(pairs, writes.rejections + attends.rejections)


def _pairs(writes: tuple[Candidate, ...], attends: tuple[Candidate, ...]) -> Iterator[Candidate]:
    for attend in attends:
        # Who names a precompiled attention may have no compiler for the write either.
        for write in sorted(writes, key=lambda write: attend.tier == "blob" and write.needs_compiler):
            yield Candidate(
                f"{write.kernel}+{attend.kernel}",
                attend.tier,
                _run(write, attend),
                attend.config,
                attend.why,
                attend.options,
                parts=(Part(write, operator.attrgetter("write")), Part(attend, operator.attrgetter("attend"))),
                source=f"{write.source} {attend.source}",
                footprint=attend.footprint,
            )


def _run(write: Candidate, attend: Candidate) -> Any:
    def run(call: WriteAndAttendCall, launch: Launcher) -> Any:
        write.run(call.write, launch)
        return attend.run(call.attend, launch)

    return run
