"""Counts of what happened in this process, for dashboards and tests."""

from __future__ import annotations

import collections

from tcport.locks import process_lock

_lock = process_lock()
_counts: collections.Counter[str] = collections.Counter()


def counters() -> dict[str, int]:
    """What happened in this process so far, by name; a name is absent until it happens.

    ``graphs``: compiled graphs. ``graphs from cache``: of these, answered by Inductor's cache.
    ``fallback <cause>``: steps down the chain (causes: :data:`tcport.report.Cause`). ``recompiles after a failed
    launch`` and ``calls run again``: what a failure in compiled code led to. ``graphs left uncompiled``: where no
    compiler works. ``self-tests``: kernels tried against the reference. ``probes``: capability probes that ran.
    ``bundle kernels loaded``: precompiled kernels.
    """
    with _lock:
        return dict(_counts)


def count(name: str, number: int = 1) -> None:
    """Add to a counter."""
    with _lock:
        _counts[name] += number
