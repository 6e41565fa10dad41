"""The catalogue of devices that are not in the room, read from ``catalog.toml``."""

from __future__ import annotations

import difflib
import functools
from importlib import resources
from typing import Any

from tcport.device import isa
from tcport.device.facts import Report, merge
from tcport.device.profile import DeviceProfile, toml_loads
from tcport.errors import ArgumentError

_NO_SOURCE = Report("catalogue", unknown={"*": "no public source is listed"})
_IDENTITY = ("vendor", "device_type", "arch", "name", "integrated")


def catalogue() -> tuple[str, ...]:
    """The names of the catalogue's devices."""
    return tuple(_data()["devices"])


@functools.cache
def catalogue_profile(name: str) -> DeviceProfile:
    """The profile of a device in the catalogue; every fact names its public source.

    Args:
        name: as :func:`catalogue` lists it; case, spaces and dashes do not matter.

    Raises:
        ArgumentError: when there is no such device; close names are given.
    """
    key = _plain(name)
    data = _data()
    names = {_plain(listed): listed for listed in data["devices"]}
    if key not in names:
        close = difflib.get_close_matches(key, names, n=3)
        hint = (
            f"Did you mean {' or '.join(names[c] for c in close)}?"
            if close
            else f"It has {', '.join(data['devices'])}."
        )
        here = " tcport.device_profile('cpu') has this machine's CPU." if key == "cpu" else ""
        raise ArgumentError(f"The catalogue has no device {name!r}.", hint + here)
    device = data["devices"][names[key]]
    identity = {fact: device[fact] for fact in ("arch", "name", "integrated")}
    reports = [Report("catalogue", identity)]
    for group in (device, data["targets"].get(device["arch"], {})):
        reports += [
            Report(data["sources"][source], facts) for source, facts in group.items() if source not in _IDENTITY
        ]
    return merge(device["vendor"], device.get("device_type", "cuda"), [*reports, isa.read(device["arch"]), _NO_SOURCE])


@functools.cache
def _data() -> dict[str, Any]:
    return toml_loads(resources.files("tcport.device").joinpath("catalog.toml").read_text(encoding="utf-8"))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
