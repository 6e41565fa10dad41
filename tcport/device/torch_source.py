"""Device facts as torch reports them: the fallback behind every vendor's runtime."""

from __future__ import annotations

from typing import Any

import torch

from tcport.device.facts import Report, sift


def read(device: torch.device) -> Report:
    """Facts about a visible ``cuda`` (NVIDIA or AMD) or ``xpu`` device from torch's own properties.

    Initialises the device's runtime, as any use of the device would.
    """
    source = f"torch {torch.__version__} properties"
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "get_device_properties") or not module.is_available():
        return Report(source, unknown={"*": f"torch sees no {device.type} device"})
    if (device.index or 0) >= module.device_count():
        return Report(source, unknown={"*": f"torch sees {module.device_count()} {device.type} devices"})
    try:
        props = module.get_device_properties(device)
    except (RuntimeError, AssertionError) as error:  # no driver, or a build without this device
        return Report(source, unknown={"*": str(error).splitlines()[0]})
    return sift(source, _xpu(props) if device.type == "xpu" else _cuda(props))


def _cuda(props: Any) -> dict[str, Any]:
    is_amd = torch.version.hip is not None
    gcn_arch = getattr(props, "gcnArchName", "")
    return {
        "arch": gcn_arch.split(":")[0] if is_amd else f"sm_{props.major}{props.minor}",
        "name": props.name,
        "uuid": str(getattr(props, "uuid", "")),
        "runtime_version": torch.version.hip if is_amd else torch.version.cuda,
        "integrated": bool(props.is_integrated),
        "compute_units": props.multi_processor_count,
        "warp_width": getattr(props, "warp_size", None),
        "max_threads_per_cta": getattr(props, "max_threads_per_block", None),
        "max_threads_per_unit": getattr(props, "max_threads_per_multi_processor", None),
        "registers_per_unit": getattr(props, "regs_per_multiprocessor", None),
        "shared_per_cta": getattr(props, "shared_memory_per_block", None),
        "shared_per_cta_optin": getattr(props, "shared_memory_per_block_optin", None),
        "shared_per_unit": getattr(props, "shared_memory_per_multiprocessor", None),
        "l2_bytes": getattr(props, "L2_cache_size", None),
        "memory_bytes": props.total_memory,
        # Two transfers per clock holds for NVIDIA only; AMD's clocks stand for two, four or sixteen.
        "memory_bandwidth": None if is_amd else _bandwidth(props),
        "clock_hz": _hertz(getattr(props, "clock_rate", None)),
    }


def _xpu(props: Any) -> dict[str, Any]:
    sub_groups = [size for size in getattr(props, "sub_group_sizes", []) if size]
    return {
        "name": props.name,
        "uuid": str(getattr(props, "uuid", "")),
        "driver_version": getattr(props, "driver_version", None),
        "runtime_version": getattr(props, "version", None),
        "integrated": getattr(props, "is_integrated_gpu", None),
        "compute_units": getattr(props, "gpu_subslice_count", None),
        "warp_width": 16 if 16 in sub_groups else max(sub_groups, default=None),
        "max_threads_per_cta": getattr(props, "max_work_group_size", None),
        "shared_per_cta": getattr(props, "local_mem_size", None),
        "shared_per_cta_optin": getattr(props, "local_mem_size", None),
        "l2_bytes": getattr(props, "last_level_cache_size", None),
        "memory_bytes": props.total_memory,
        "mma_atom": "dpas" if getattr(props, "has_subgroup_matrix_multiply_accumulate", False) else None,
    }


def _bandwidth(props: Any) -> float | None:
    """Two transfers per clock over the whole bus; torch gives kHz and bits."""
    rate, width = getattr(props, "memory_clock_rate", None), getattr(props, "memory_bus_width", None)
    return 2.0 * rate * 1e3 * width / 8 if rate and width else None


def _hertz(kilohertz: float | None) -> float | None:
    return kilohertz * 1e3 if kilohertz else None
