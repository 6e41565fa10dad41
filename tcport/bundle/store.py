"""The bundles of this process: those named by ``TCPORT_BUNDLE``, and those it asked for."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tcport.bundle.manifest import Bundle, read_bundle
from tcport.errors import BundleError
from tcport.kernels import cpu_library as cpu_kernels
from tcport.logs import logger
from tcport.lowering.registry import touch

ENVIRONMENT_VARIABLE = "TCPORT_BUNDLE"

_asked: list[Bundle] = []


def use_bundle(folder: str | Path) -> Bundle:
    """Let the chain take precompiled kernels from a folder, before those of earlier calls.

    Raises:
        BundleError: it is no bundle.
    """
    bundle = read_bundle(folder)
    _asked[:] = [bundle, *(other for other in _asked if other.folder != bundle.folder)]
    touch()
    return bundle


def bundles() -> tuple[tuple[Bundle, ...], tuple[str, ...]]:
    """The bundles to look into, in order, and why folders that were named hold none."""
    named, faults = _named(named_folders())
    return (*_asked, *named), faults


def named_folders() -> str:
    """What ``TCPORT_BUNDLE`` says now: what was chosen while it said something else may be out of date."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "")


def cpu_library(identity: str) -> Path | None:
    """The CPU's kernels of this identity out of a bundle, if one has them whole."""
    for bundle in bundles()[0]:
        try:
            found = bundle.cpu_library(identity)
        except BundleError as error:
            logger("chain").warning("%s", error)
            continue
        if found is not None:
            return found
    return None


@functools.lru_cache(maxsize=8)
def _named(folders: str) -> tuple[tuple[Bundle, ...], tuple[str, ...]]:
    found: list[Bundle] = []
    faults: list[str] = []
    for folder in filter(None, folders.split(os.pathsep)):
        try:
            found.append(read_bundle(folder))
        except BundleError as error:
            faults.append(error.cause)
    return tuple(found), tuple(faults)


cpu_kernels.look_first(cpu_library)
