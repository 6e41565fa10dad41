"""Facts that change while a process runs, watched in the background: units, clock and power limit of a device.

A laptop that is unplugged lowers its power limit, an operator caps a card, a slice is resized. What was read before
is then forgotten: later compiles and eager calls plan for the device as it is. Compiled kernels stay, since their
numbers do not depend on it.

Off unless asked for (:func:`watch`, or ``TCPORT_WATCH_DEVICES=5`` seconds), or the machine has a battery
(``TCPORT_WATCH_DEVICES=0`` keeps it off there too).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tcport.device import nvidia_source
from tcport.device.current import device_profile, refresh
from tcport.device.sources import present_devices, read_profile
from tcport.errors import ArgumentError

ENVIRONMENT_VARIABLE = "TCPORT_WATCH_DEVICES"
DEFAULT_SECONDS = 5.0

_log = logging.getLogger("tcport.device")


@dataclasses.dataclass(frozen=True)
class State:
    """What of a device may change; None where no source reports it.

    Attributes:
        compute_units: SMs, CUs or Xe-cores.
        clock_hz: the highest clock that its runtime reports.
        power_limit: watts it may draw now.
    """

    compute_units: int | None
    clock_hz: float | None
    power_limit: float | None

    def differences(self, later: State) -> str:
        """``clock_hz 1.98e+09 -> 1.2e+09``, one for each fact that is another."""
        pairs = zip(dataclasses.asdict(self).items(), dataclasses.asdict(later).values(), strict=True)
        return ", ".join(f"{name} {_short(old)} -> {_short(new)}" for (name, old), new in pairs if old != new)


def read_state(device: torch.device) -> State:
    """The state of a device now, from its vendor's runtime."""
    profile = read_profile(device)
    limit = nvidia_source.power_limit(profile.uuid) if profile.vendor == "nvidia" else None
    return State(profile.compute_units, profile.clock_hz, limit)


class Watcher:
    """Compares the states of devices with what they were.

    Args:
        devices: what to watch.
        read: gives the state of one of them.
        on_change: is told of a device and its new state, after cached facts have been forgotten.
    """

    def __init__(
        self,
        devices: list[torch.device],
        read: Callable[[torch.device], State] = read_state,
        on_change: Callable[[torch.device, State], None] = lambda device, state: None,
    ) -> None:
        self._read, self._on_change = read, on_change
        self._states = {device: read(device) for device in devices}

    def poll(self) -> list[torch.device]:
        """Look once; returns the devices that have changed."""
        changed = []
        for device, before in self._states.items():
            now = self._read(device)
            if now == before:
                continue
            self._states[device] = now
            refresh()
            _log.info("%s has changed (%s): later plans are made for it as it is", device, before.differences(now))
            self._on_change(device, now)
            changed.append(device)
        return changed


@contextlib.contextmanager
def watch(
    devices: list[torch.device] | None = None,
    seconds: float = DEFAULT_SECONDS,
    on_change: Callable[[torch.device, State], None] = lambda device, state: None,
    read: Callable[[torch.device], State] = read_state,
) -> Iterator[Watcher]:
    """Watch devices while the block runs.

    Args:
        devices: None: every visible accelerator.
        seconds: time between two looks.
        on_change, read: see :class:`Watcher`; called from the watching thread.

    Raises:
        ArgumentError: ``seconds`` is not positive.
    """
    if not seconds > 0:
        raise ArgumentError(f"Devices cannot be watched every {seconds} seconds.", "Give a positive number.")
    if devices is None:
        devices = [device for device in present_devices() if device.type != "cpu"]
    watcher, stop = Watcher(devices, read, on_change), threading.Event()
    thread = threading.Thread(target=_run, args=(watcher, seconds, stop), name="tcport-devices", daemon=True)
    thread.start()
    try:
        yield watcher
    finally:
        stop.set()
        thread.join()


@functools.cache
def watch_if_wanted(device_type: str) -> threading.Thread | None:
    """Start watching for the rest of the process where the environment, or a battery, asks for it.

    Raises:
        ArgumentError: ``TCPORT_WATCH_DEVICES`` is no number.
    """
    seconds = _wanted_seconds()
    if device_type == "cpu" or seconds <= 0:
        return None
    device_profile(device_type)  # the runtimes are started by this thread
    watcher = Watcher([device for device in present_devices() if device.type != "cpu"])
    arguments = (watcher, seconds, threading.Event())
    thread = threading.Thread(target=_run, args=arguments, name="tcport-devices", daemon=True)
    thread.start()
    return thread


def has_battery(supplies: Path = Path("/sys/class/power_supply")) -> bool:
    """Whether the machine runs from a battery at times; False where the system does not tell."""
    try:
        return any((supply / "type").read_text().strip() == "Battery" for supply in supplies.iterdir())
    except OSError:  # not Linux, or a container that hides it
        return False


def _wanted_seconds() -> float:
    given = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not given:
        return DEFAULT_SECONDS if has_battery() else 0.0
    try:
        return float(given)
    except ValueError as error:
        raise ArgumentError(
            f"{ENVIRONMENT_VARIABLE}={given!r} is no number.", "Give the seconds between two looks; 0 is off."
        ) from error


def _run(watcher: Watcher, seconds: float, stop: threading.Event) -> None:
    while not stop.wait(seconds):
        try:
            watcher.poll()
        except Exception:
            _log.exception("devices are no longer watched")
            raise


def _short(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"
