"""AMD facts: hip-python, in the call forms of its 7.x and 10.x releases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcport.device.facts import Report, SourceError, sift
from tcport.device.visible import why_hidden

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def read(ordinal: int, hip: Any = None) -> list[Report]:
    """The HIP runtime's report on visible device ``ordinal``, as torch counts devices.

    Args:
        ordinal: index among visible devices.
        hip: ``hip.hip`` or a stand-in; None imports it.
    """
    try:
        return [_from_hip(ordinal, hip or _import())]
    except SourceError as error:
        return [Report("HIP runtime", unknown={"*": str(error)})]


def override_note(environ: Mapping[str, str] | None = None, nodes: Path = _KFD_NODES) -> str | None:
    """One sentence on ``HSA_OVERRIDE_GFX_VERSION`` against the kernel driver's answer; None if it is not set."""
    text = (os.environ if environ is None else environ).get(OVERRIDE)
    if not text:
        return None
    claimed = _target(text)
    if claimed is None:
        return f"{OVERRIDE}={text!r} is not of the form major.minor.stepping."
    actual = _kernel_targets(nodes)
    if not actual:
        return f"{OVERRIDE} makes the runtime report {claimed}; the kernel driver's own answer cannot be read."
    if claimed in actual:
        return f"{OVERRIDE} claims {claimed}, which is what the kernel driver reports."
    return f"{OVERRIDE} makes the runtime report {claimed}, but the hardware is {', '.join(sorted(actual))}."


def _from_hip(ordinal: int, hip: Any) -> Report:
    count = _call(hip, "hipGetDeviceCount")
    if ordinal >= count:
        hidden = why_hidden("amd", ordinal)
        raise SourceError(f"{count} devices are visible" + (f"; {hidden}" if hidden else ""))
    props = _properties(hip, ordinal)

    def get(*names: str) -> Any:
        """The first property that is there and not zero: HIP leaves fields it does not fill at 0."""
        return next((value for value in (getattr(props, name, None) for name in names) if value), None)

    version = _call(hip, "hipRuntimeGetVersion")
    arch = _text(get("gcnArchName"))
    clock = get("clockRate")
    bus = [getattr(props, name, None) for name in ("pciDomainID", "pciBusID", "pciDeviceID")]
    values = {
        "arch": arch.split(":")[0] if arch else None,
        "name": _text(get("name")),
        "uuid": _text(getattr(get("uuid"), "bytes", None)),
        "pci_bus_id": "{:04x}:{:02x}:{:02x}.0".format(*bus) if None not in bus and any(bus) else None,
        "runtime_version": f"{version // 10**7}.{version // 10**5 % 100}.{version % 10**5}" if version else None,
        "integrated": bool(props.integrated),
        "compute_units": get("multiProcessorCount"),
        "warp_width": get("warpSize"),
        "max_threads_per_cta": get("maxThreadsPerBlock"),
        "max_threads_per_unit": get("maxThreadsPerMultiProcessor"),
        "registers_per_unit": get("regsPerMultiprocessor"),
        "shared_per_cta": get("sharedMemPerBlock"),
        # LDS needs no opt-in, and HIP leaves the field 0 where it has nothing to add.
        "shared_per_cta_optin": get("sharedMemPerBlockOptin", "sharedMemPerBlock"),
        "shared_per_unit": get("sharedMemPerMultiprocessor", "maxSharedMemoryPerMultiProcessor"),
        "l2_bytes": get("l2CacheSize"),
        "memory_bytes": get("totalGlobalMem"),
        "clock_hz": clock * 1e3 if clock else None,
    }
    report = sift("HIP runtime", values)
    unknown = {**report.unknown, "memory_bandwidth": "HIP gives the memory clock, not the transfers per clock"}
    return Report(report.source, report.facts, unknown, report.flags)


def _properties(hip: Any, ordinal: int) -> Any:
    try:
        return _call(hip, "hipGetDeviceProperties", ordinal)  # 10.x returns the struct
    except TypeError:  # 7.x fills one that the caller brings
        props = hip.hipDeviceProp_t()
        _call(hip, "hipGetDeviceProperties", props, ordinal)
        return props


def _call(hip: Any, name: str, *args: Any) -> Any:
    try:
        code, *result = getattr(hip, name)(*args)
    except RuntimeError as error:  # the binding found no libamdhip64
        raise SourceError(str(error)) from error
    except AttributeError as error:  # a release of the binding without this function
        raise SourceError(f"the binding has no {name}") from error
    if int(code) != 0:
        raise SourceError(f"{name} answered {getattr(code, 'name', code)}")
    return result[0] if result else None


def _import() -> Any:
    try:
        from hip import hip
    except ImportError as error:
        raise SourceError(f"hip-python cannot be imported: {error}") from error
    return hip


def _target(version: str) -> str | None:
    """``11.0.0`` as ``gfx1100``, ``9.0.10`` as ``gfx90a``: minor and stepping are hexadecimal digits."""
    match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version.strip())
    return f"gfx{int(match[1])}{int(match[2]):x}{int(match[3]):x}" if match else None


def _kernel_targets(nodes: Path) -> set[str]:
    """Targets of the GPUs the kernel driver lists: ``gfx_target_version 110501`` is gfx1151."""
    found = set()
    for properties in sorted(nodes.glob("*/properties")):
        try:
            text = properties.read_text()
        except OSError:  # no permission for this node: it cannot be compared
            continue
        match = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        if match and (number := int(match[1])):
            found.add(f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}")
    return found


def _text(value: bytes | str | None) -> str | None:
    return value.split(b"\0")[0].decode(errors="replace") if isinstance(value, bytes) else value
