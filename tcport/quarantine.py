"""Kernels that failed on this device, so that no later call tries them again.

An entry holds for one device and driver, one kernel source and tile, one compiler, and the facts of the call that
decide what is compiled; a change in any of them makes another key, and the kernel is tried anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from typing import Any

from tcport.fingerprint import fingerprint
from tcport.locks import process_lock
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


_lock = process_lock()
_entries: dict[str, Entry] = {}
_version = 0
_expiry = math.inf
"""When the next entry expires (``time.monotonic`` seconds), or an earlier time."""


def add(key: str, reason: FallbackReason) -> bool:
    """Keep a kernel (see :func:`keys_of`) from being tried again for calls like the one that failed.

    Returns:
        False where another thread has met the failure first.
    """
    global _version, _expiry
    now = time.monotonic()
    until = now + RETRY_AFTER if reason.cause in _PASSING else None
    with _lock:
        known = _entries.get(key)
        if known is not None and (known.until is None or now < known.until):
            return False
        _entries[key] = Entry(reason, until)
        _version += 1
        _expiry = min(_expiry, math.inf if until is None else until)
        return True


def version() -> int:
    """A number that changes with every entry that comes, is forgotten, or expires.

    What was chosen under another one may be out of date.
    """
    if time.monotonic() >= _expiry:
        _drop_expired()
    return _version


def reason(choice: NodeChoice, candidate: Candidate) -> FallbackReason | None:
    """Why a candidate is not to be tried, because of any kernel it runs; None when it may be."""
    if not _entries:
        return None
    entries = map(_entry, keys_of(choice, candidate).values())
    return next((entry.reason for entry in entries if entry is not None), None)


def reasons(choice: NodeChoice) -> dict[Candidate, FallbackReason]:
    """The single kernels of a chain that are not to be tried, and why."""
    keys = {kernel: key for link in choice.selection.candidates for kernel, key in keys_of(choice, link).items()}
    entries = {kernel: _entry(key) for kernel, key in keys.items()}
    return {kernel: entry.reason for kernel, entry in entries.items() if entry is not None}


def keys() -> list[str]:
    """The keys that hold now, in order: code compiled under other keys is other code."""
    now = time.monotonic()
    with _lock:
        return sorted(k for k, entry in _entries.items() if entry.until is None or now < entry.until)


def clear() -> None:
    """Forget every failure."""
    global _version, _expiry
    with _lock:
        _entries.clear()
        _version += 1
        _expiry = math.inf


def keys_of(choice: NodeChoice, candidate: Candidate) -> dict[Candidate, str]:
    """The single kernels a candidate runs, each with its identity on the device for calls that compile alike.

    A kernel has the same identity alone and as a half of a pair.
    """
    device = choice.profile.digest()
    return {kernel: _key(device, kernel, spec) for kernel, spec in candidate.steps(choice.spec)}


def _key(device: str, kernel: Candidate, spec: Any) -> str:
    facts = (fingerprint(), device, kernel.source, str(kernel.uncut), compiled_facts(spec))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _entry(key: str) -> Entry | None:
    """What holds of a kernel now."""
    if time.monotonic() >= _expiry:
        _drop_expired()
    with _lock:
        return _entries.get(key)


def _drop_expired() -> None:
    global _version, _expiry
    now = time.monotonic()
    with _lock:
        for key in [key for key, entry in _entries.items() if entry.until is not None and now >= entry.until]:
            del _entries[key]
            _version += 1
        _expiry = min((entry.until for entry in _entries.values() if entry.until is not None), default=math.inf)
