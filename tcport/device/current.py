"""Which profile holds for a device: the caller's, the environment's, or what the sources read."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Hashable, Iterator
from pathlib import Path

import torch

from tcport.device.catalog import catalogue_profile
from tcport.device.profile import DeviceProfile
from tcport.device.sources import read_profile

ENVIRONMENT_VARIABLE = "TCPORT_DEVICE_PROFILE"

_scoped: contextvars.ContextVar[DeviceProfile | None] = contextvars.ContextVar("tcport_device_profile", default=None)
_chosen: dict[str, DeviceProfile] = {}


def device_profile(device: torch.device | str | int | None = None) -> DeviceProfile:
    """The profile of a device: an override if one holds for its type, else facts read once and cached.

    Overrides, first wins: :func:`override_profile`, :func:`set_profile`, the environment variable
    ``TCPORT_DEVICE_PROFILE`` (what :func:`load_profile` takes). An override speaks for devices of its own type only:
    an H200 profile does not describe the CPU.

    Args:
        device: any torch device, or an index of the default accelerator. None: the override if there is one, else the
            current accelerator, else the CPU.
    """
    if device is None:
        override = _override(None)
        return override if override is not None else _read(_default_device())
    device = torch.device(device)
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, _current_index(device.type))
    override = _override(device.type)
    return override if override is not None else _read(device)


@contextlib.contextmanager
def override_profile(profile: DeviceProfile | str) -> Iterator[DeviceProfile]:
    """Within the block (of this thread or task) ``profile`` describes every device of its type."""
    profile = load_profile(profile) if isinstance(profile, str) else profile
    token = _scoped.set(profile)
    try:
        yield profile
    finally:
        _scoped.reset(token)


def set_profile(profile: DeviceProfile | str | None, device_type: str = "cuda") -> None:
    """Lets ``profile`` describe every device of its type in this process; None takes that back for ``device_type``."""
    if profile is None:
        _chosen.pop(device_type, None)
        return
    profile = load_profile(profile) if isinstance(profile, str) else profile
    _chosen[profile.device_type] = profile


_refreshes = 0


def refresh() -> None:
    """Forgets what was read, so that the next :func:`device_profile` asks the sources again."""
    global _refreshes
    _refreshes += 1
    _read.cache_clear()
    load_profile.cache_clear()


def refreshes() -> int:
    """A number that grows with each :func:`refresh`: what was chosen under another one may be out of date.

    A device may have changed in what is no fact of its profile, such as its power limit.
    """
    return _refreshes


def profile_state() -> Hashable:
    """Everything besides the device that :func:`device_profile` answers by: under equal states it answers alike."""
    return _refreshes, _scoped.get(), tuple(_chosen.items()), os.environ.get(ENVIRONMENT_VARIABLE)


@functools.cache
def load_profile(name_or_path: str) -> DeviceProfile:
    """A profile by what it is called: a ``.json``/``.toml`` file, a name of the catalogue, or ``cpu``.

    ``cpu`` is this machine's, as it was read: overrides do not change what a name stands for.

    Raises:
        ArgumentError: when the file cannot be read or the catalogue has no such device.
    """
    if Path(name_or_path).suffix in (".json", ".toml"):
        return DeviceProfile.from_file(name_or_path)
    if name_or_path == "cpu":
        return _read(torch.device("cpu"))
    return catalogue_profile(name_or_path)


def _override(device_type: str | None) -> DeviceProfile | None:
    scoped = _scoped.get()
    if scoped is not None and device_type in (None, scoped.device_type):
        return scoped
    if device_type is None and _chosen:
        return next(iter(_chosen.values()))
    if device_type in _chosen:
        return _chosen[device_type]
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        profile = load_profile(named)
        if device_type in (None, profile.device_type):
            return profile
    return None


@functools.cache
def _read(device: torch.device) -> DeviceProfile:
    return read_profile(device)


def _default_device() -> torch.device:
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_available():
            return torch.device(kind, _current_index(kind))
    return torch.device("cpu")


def _current_index(kind: str) -> int:
    module = getattr(torch, kind, None)
    return module.current_device() if module is not None and module.is_available() else 0
