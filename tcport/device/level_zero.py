"""The part of Level Zero's C interface that device facts need, through ctypes: there is no Python binding.

Structures follow ``ze_api.h`` of the Level Zero specification 1.x.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
from ctypes import byref, c_char, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

from tcport.device.facts import SourceError

GPU = 1
INTEGRATED = 1


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU as the driver lists it; every structure is filled."""

    api_version: int
    driver_version: int
    properties: Properties
    compute: Compute
    memories: tuple[Memory, ...]
    caches: tuple[Cache, ...]
    pci: Pci | None
    ip_version: int | None


class _Extensible(ctypes.Structure):
    _fields_ = [("stype", c_uint32), ("pNext", c_void_p)]
    stype_value = 0

    def __init__(self) -> None:
        super().__init__(stype=self.stype_value)


class IpVersion(_Extensible):
    _fields_ = [("ipVersion", c_uint32)]
    stype_value = 0x1000F


class Driver(_Extensible):
    _fields_ = [("uuid", c_uint8 * 16), ("driverVersion", c_uint32)]
    stype_value = 0x1


class Properties(_Extensible):
    _fields_ = [
        ("type", c_uint32),
        ("vendorId", c_uint32),
        ("deviceId", c_uint32),
        ("flags", c_uint32),
        ("subdeviceId", c_uint32),
        ("coreClockRate", c_uint32),
        ("maxMemAllocSize", c_uint64),
        ("maxHardwareContexts", c_uint32),
        ("maxCommandQueuePriority", c_uint32),
        ("numThreadsPerEU", c_uint32),
        ("physicalEUSimdWidth", c_uint32),
        ("numEUsPerSubslice", c_uint32),
        ("numSubslicesPerSlice", c_uint32),
        ("numSlices", c_uint32),
        ("timerResolution", c_uint64),
        ("timestampValidBits", c_uint32),
        ("kernelTimestampValidBits", c_uint32),
        ("uuid", c_uint8 * 16),
        ("name", c_char * 256),
    ]
    stype_value = 0x3


class Compute(_Extensible):
    _fields_ = [
        ("maxTotalGroupSize", c_uint32),
        ("maxGroupSize", c_uint32 * 3),
        ("maxGroupCount", c_uint32 * 3),
        ("maxSharedLocalMemory", c_uint32),
        ("numSubGroupSizes", c_uint32),
        ("subGroupSizes", c_uint32 * 8),
    ]
    stype_value = 0x4


class Memory(_Extensible):
    _fields_ = [
        ("flags", c_uint32),
        ("maxClockRate", c_uint32),
        ("maxBusWidth", c_uint32),
        ("totalSize", c_uint64),
        ("name", c_char * 256),
    ]
    stype_value = 0x7


class Cache(_Extensible):
    _fields_ = [("flags", c_uint32), ("cacheSize", c_size_t)]
    stype_value = 0x9


class _PciSpeed(ctypes.Structure):
    _fields_ = [("genVersion", c_uint32), ("width", c_uint32), ("maxBandwidth", c_uint64)]


class Pci(_Extensible):
    _fields_ = [
        ("domain", c_uint32),
        ("bus", c_uint32),
        ("device", c_uint32),
        ("function", c_uint32),
        ("maxSpeed", _PciSpeed),
    ]
    stype_value = 0x10008


def load() -> Any:
    """The Level Zero loader.

    Raises:
        SourceError: when it is not installed.
    """
    name = ctypes.util.find_library("ze_loader") or "libze_loader.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise SourceError(f"the Level Zero loader cannot be loaded: {error}") from error


def gpus(loader: Any) -> list[Device]:
    """Every visible GPU in the driver's order.

    Raises:
        SourceError: when the driver does not start.
    """
    _check(loader, "zeInit", c_uint32(0))
    found = []
    for driver in _handles(loader, "zeDriverGet"):
        version = c_uint32(0)
        _check(loader, "zeDriverGetApiVersion", driver, byref(version))
        properties = _filled(loader, "zeDriverGetProperties", driver, Driver())
        devices = (
            _device(loader, h, version.value, properties.driverVersion) for h in _handles(loader, "zeDeviceGet", driver)
        )
        found += [device for device in devices if device.properties.type == GPU]
    return found


def _device(loader: Any, handle: c_void_p, api_version: int, driver_version: int) -> Device:
    ip = IpVersion()
    properties = Properties()
    properties.pNext = ctypes.cast(ctypes.pointer(ip), c_void_p)
    _filled(loader, "zeDeviceGetProperties", handle, properties)
    try:
        pci = _filled(loader, "zeDevicePciGetPropertiesExt", handle, Pci())
    except SourceError:  # an extension that older drivers lack
        pci = None
    return Device(
        api_version,
        driver_version,
        properties,
        _filled(loader, "zeDeviceGetComputeProperties", handle, Compute()),
        _several(loader, "zeDeviceGetMemoryProperties", handle, Memory),
        _several(loader, "zeDeviceGetCacheProperties", handle, Cache),
        pci,
        ip.ipVersion or None,
    )


def _handles(loader: Any, function: str, *parent: c_void_p) -> list[c_void_p]:
    count = c_uint32(0)
    _check(loader, function, *parent, byref(count), None)
    array = (c_void_p * count.value)()
    _check(loader, function, *parent, byref(count), array)
    return [c_void_p(array[i]) for i in range(count.value)]


def _several(loader: Any, function: str, handle: c_void_p, kind: Any) -> tuple[Any, ...]:
    count = c_uint32(0)
    _check(loader, function, handle, byref(count), None)
    array = (kind * count.value)(*(kind() for _ in range(count.value)))
    _check(loader, function, handle, byref(count), array)
    return tuple(array)


def _filled(loader: Any, function: str, handle: c_void_p, structure: Any) -> Any:
    _check(loader, function, handle, byref(structure))
    return structure


def _check(loader: Any, function: str, *args: Any) -> None:
    try:
        code = getattr(loader, function)(*args)
    except AttributeError as error:  # the loader does not export it
        raise SourceError(f"{function} is missing from the Level Zero loader") from error
    if code != 0:
        raise SourceError(f"{function} answered {code & 0xFFFFFFFF:#010x}")
