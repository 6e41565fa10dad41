"""Locks of a process that may fork."""

from __future__ import annotations

import os
import threading


def process_lock() -> threading.Lock:
    """A lock that a forked child never finds held by a thread it does not have; for use in a module, as it stays."""
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
