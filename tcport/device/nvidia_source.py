"""NVIDIA facts: the CUDA driver for the visible device, NVML (matched by UUID) for what the driver does not tell."""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from tcport.device.facts import Report, SourceError, sift
from tcport.device.visible import why_hidden

# CUdevice_attribute name -> our fact.
_ATTRIBUTES = {
    "INTEGRATED": "integrated",
    "MULTIPROCESSOR_COUNT": "compute_units",
    "WARP_SIZE": "warp_width",
    "MAX_THREADS_PER_BLOCK": "max_threads_per_cta",
    "MAX_THREADS_PER_MULTIPROCESSOR": "max_threads_per_unit",
    "MAX_REGISTERS_PER_MULTIPROCESSOR": "registers_per_unit",
    "MAX_SHARED_MEMORY_PER_BLOCK": "shared_per_cta",
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": "shared_per_cta_optin",
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": "shared_per_unit",
    "L2_CACHE_SIZE": "l2_bytes",
}


def read(ordinal: int, driver: Any = None, nvml: Any = None) -> list[Report]:
    """Reports on visible CUDA device ``ordinal``, the driver's first.

    Args:
        ordinal: index among visible devices, as torch counts them.
        driver: ``cuda.bindings.driver`` or a stand-in; None imports it.
        nvml: ``pynvml`` or a stand-in; None imports it.
    """
    try:
        report = _from_driver(ordinal, driver or _import("cuda.bindings.driver", "cuda-python"))
    except SourceError as error:
        report = Report("CUDA driver", unknown={"*": str(error)})
    try:
        telemetry = _from_nvml(report.facts.get("uuid"), nvml or _import("pynvml", "nvidia-ml-py"))
    except SourceError as error:
        telemetry = Report("NVML", unknown={"*": str(error)})
    if telemetry.flags.get("mig"):
        # The driver describes the parent's memory bus; a slice has a share of it that no call reports.
        facts = {name: value for name, value in report.facts.items() if name != "memory_bandwidth"}
        unknown = {**report.unknown, "memory_bandwidth": "a MIG slice's share of the bus is not reported"}
        report = Report(report.source, facts, unknown, report.flags)
    return [report, telemetry]


def power_limit(device_uuid: str | None, nvml: Any = None) -> float | None:
    """Watts that the device with this UUID may draw now; None where NVML does not say."""
    try:
        nvml = nvml or _import("pynvml", "nvidia-ml-py")
        with _session(nvml, device_uuid) as (handle, _):
            milliwatts = _attempt(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    except SourceError:
        return None
    return milliwatts / 1e3 if milliwatts else None


def _from_driver(ordinal: int, driver: Any) -> Report:
    call = _caller(driver)
    call("cuInit", 0)
    count = call("cuDeviceGetCount")
    if ordinal >= count:
        hidden = why_hidden("nvidia", ordinal)
        raise SourceError(f"{count} devices are visible" + (f"; {hidden}" if hidden else ""))
    device = call("cuDeviceGet", ordinal)

    def attribute(name: str) -> int | None:
        try:
            return call(
                "cuDeviceGetAttribute", getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device
            )
        except (SourceError, AttributeError):  # an attribute this driver or binding does not have
            return None

    values: dict[str, Any] = {fact: attribute(name) for name, fact in _ATTRIBUTES.items()}
    if values["integrated"] is not None:
        values["integrated"] = bool(values["integrated"])
    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    version = call("cuDriverGetVersion")
    memory_clock, bus_width = attribute("MEMORY_CLOCK_RATE"), attribute("GLOBAL_MEMORY_BUS_WIDTH")
    clock = attribute("CLOCK_RATE")
    # The second form tells MIG slices of one card apart; newer bindings give it under the plain name.
    get_uuid = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    bus = [attribute(f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE")]
    values |= {
        "arch": f"sm_{major}{minor}" if major and minor is not None else None,
        "name": _text(call("cuDeviceGetName", 256, device)),
        "uuid": str(uuid.UUID(bytes=bytes(call(get_uuid, device).bytes))),
        "pci_bus_id": "{:04x}:{:02x}:{:02x}.0".format(*bus) if None not in bus and any(bus) else None,
        "runtime_version": f"{version // 1000}.{version % 1000 // 10}" if version else None,
        "memory_bytes": call("cuDeviceTotalMem", device),
        # Two transfers per clock over the whole bus; the driver gives kHz and bits.
        "memory_bandwidth": 2e3 * memory_clock * bus_width / 8 if memory_clock and bus_width else None,
        "clock_hz": clock * 1e3 if clock else None,
    }
    return sift("CUDA driver", values)


def _from_nvml(device_uuid: str | None, nvml: Any) -> Report:
    """Driver version and clock of the device with this UUID; NVML counts all devices, so an index would lie."""
    with _session(nvml, device_uuid) as (handle, is_slice):
        values = {
            "driver_version": _text(_attempt(nvml, nvml.nvmlSystemGetDriverVersion)),
            "clock_hz": _hertz(_attempt(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
        }
        return sift("NVML", values, flags={"mig": is_slice})


@contextlib.contextmanager
def _session(nvml: Any, device_uuid: str | None) -> Iterator[tuple[Any, bool]]:
    """NVML's handle of a device, and whether the device is a MIG slice of it."""
    if device_uuid is None:
        raise SourceError("the visible device has no UUID to find it by")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SourceError(str(error)) from error
    try:
        yield _handle(nvml, device_uuid)
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, device_uuid: str) -> tuple[Any, bool]:
    for prefix, is_slice in (("GPU-", False), ("MIG-", True)):
        handle = _attempt(nvml, lambda name=prefix + device_uuid: nvml.nvmlDeviceGetHandleByUUID(name.encode()))
        if handle is None:
            continue
        if is_slice:  # clocks belong to the parent
            handle = _attempt(nvml, lambda h=handle: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(h)) or handle
        return handle, is_slice
    raise SourceError(f"NVML knows no device with UUID {device_uuid}")


def _attempt(nvml: Any, query: Callable[[], Any]) -> Any:
    """The answer, or None where NVML refuses it (not supported, no permission): the fact is then unknown."""
    try:
        return query()
    except nvml.NVMLError:
        return None


def _caller(driver: Any) -> Callable[..., Any]:
    """Calls a driver function and turns its error code, or a missing driver library, into a SourceError."""

    def call(name: str, *args: Any) -> Any:
        try:
            code, *result = getattr(driver, name)(*args)
        except RuntimeError as error:  # the binding found no driver library
            raise SourceError(str(error)) from error
        except AttributeError as error:  # a release of the binding without this function
            raise SourceError(f"the binding has no {name}") from error
        if int(code) != 0:
            raise SourceError(f"{name} answered {getattr(code, 'name', code)}")
        return result[0] if result else None

    return call


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SourceError(f"{package} cannot be imported: {error}") from error


def _hertz(megahertz: float | None) -> float | None:
    return megahertz * 1e6 if megahertz else None


def _text(value: bytes | str | None) -> str | None:
    return value.split(b"\0")[0].decode() if isinstance(value, bytes) else value
