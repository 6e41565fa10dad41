"""Kernels that failed on this device, so that no later call tries them again.

An entry holds for one device and driver, one kernel source and tile, one compiler, and the facts of the call that
decide what is compiled; a change in any of them makes another key, and the kernel is tried anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time

from tcport.fingerprint import fingerprint
from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import NodeChoice
from tcport.lowering.spec import compiled_facts
from tcport.report import Cause, FallbackReason

RETRY_AFTER = 600.0
"""Seconds after which a cause that may pass by itself (a full disk, a busy device) is tried again."""

_PASSING: frozenset[Cause] = frozenset({"launch", "toolchain", "unavailable"})


@dataclasses.dataclass(frozen=True)
class Entry:
    """Why a kernel is not tried, and until when (``time.monotonic`` seconds; None: as long as the process lives)."""

    reason: FallbackReason
    until: float | None


_lock = threading.Lock()
_entries: dict[str, Entry] = {}


def add(choice: NodeChoice, candidate: Candidate, reason: FallbackReason) -> None:
    """Keep a candidate from being tried again for calls like this one."""
    until = time.monotonic() + RETRY_AFTER if reason.cause in _PASSING else None
    with _lock:
        _entries[key(choice, candidate)] = Entry(reason, until)


def reason(choice: NodeChoice, candidate: Candidate) -> FallbackReason | None:
    """Why a candidate is not to be tried; None when it may be."""
    if not _entries:
        return None
    entry_key = key(choice, candidate)
    with _lock:
        entry = _entries.get(entry_key)
        if entry is not None and entry.until is not None and time.monotonic() >= entry.until:
            del _entries[entry_key]
            entry = None
    return entry.reason if entry else None


def keys() -> list[str]:
    """The keys that hold now, in order: code compiled under other keys is other code."""
    now = time.monotonic()
    with _lock:
        return sorted(k for k, entry in _entries.items() if entry.until is None or now < entry.until)


def clear() -> None:
    """Forget every failure."""
    with _lock:
        _entries.clear()


def key(choice: NodeChoice, candidate: Candidate) -> str:
    """The identity of a candidate on a device for calls that compile alike."""
    parts = (fingerprint(), choice.profile.digest(), candidate.source, str(candidate), compiled_facts(choice.spec))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
