"""Stand-ins for vendor runtimes: the same calls and return conventions, with the facts a test gives them."""

from __future__ import annotations

import ctypes
import enum
import uuid
from types import SimpleNamespace

from tcport.device import level_zero

SLICE_UUID = uuid.UUID("c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")


class CudaResult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100


class AttributeNames:
    """Stands for the CUdevice_attribute enum: every name is its own value."""

    def __getattr__(self, name: str) -> str:
        if not name.startswith("CU_DEVICE_ATTRIBUTE_"):
            raise AttributeError(name)
        return name.removeprefix("CU_DEVICE_ATTRIBUTE_")


MIG_SLICE = {
    "MULTIPROCESSOR_COUNT": 14,
    "WARP_SIZE": 32,
    "MAX_THREADS_PER_BLOCK": 1024,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "L2_CACHE_SIZE": 0,
    "INTEGRATED": 0,
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "CLOCK_RATE": 1980000,
    "MEMORY_CLOCK_RATE": 3201000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "PCI_DOMAIN_ID": 0,
    "PCI_BUS_ID": 0x1B,
    "PCI_DEVICE_ID": 0,
}


def cuda_driver(devices=(MIG_SLICE,), memory=10 << 30, version=13000, init=CudaResult.CUDA_SUCCESS) -> SimpleNamespace:
    ok = CudaResult.CUDA_SUCCESS

    def attribute(name, device):
        facts = devices[device]
        return (ok, facts[name]) if name in facts else (CudaResult.CUDA_ERROR_INVALID_VALUE, 0)

    return SimpleNamespace(
        CUdevice_attribute=AttributeNames(),
        cuInit=lambda flags: (init,),
        cuDeviceGetCount=lambda: (ok, len(devices)),
        cuDeviceGet=lambda ordinal: (ok, ordinal),
        cuDeviceGetAttribute=attribute,
        cuDeviceGetName=lambda length, device: (ok, b"NVIDIA H200 MIG 1g.18gb".ljust(length, b"\0")),
        cuDeviceGetUuid=lambda device: (ok, SimpleNamespace(bytes=SLICE_UUID.bytes)),
        cuDeviceTotalMem=lambda device: (ok, memory),
        cuDriverGetVersion=lambda: (ok, version),
    )


class NvmlError(Exception):
    pass


def nvml_of_parent(known=(f"MIG-{SLICE_UUID}",), permitted=True) -> SimpleNamespace:
    """An NVML that lists the parent card (132 SMs, 141 GiB) first, and finds the slice by its UUID."""

    def by_uuid(name):
        if name.decode() not in known:
            raise NvmlError("Not Found")
        return name.decode()

    def clock(handle, kind):
        if not permitted:
            raise NvmlError("Insufficient Permissions")
        return 1980 if handle == "parent" or handle.startswith("GPU-") else 0

    def init():
        return None

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        nvmlInit=init,
        nvmlShutdown=init,
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
        nvmlDeviceGetHandleByIndex=lambda index: "parent",
        nvmlDeviceGetNumGpuCores=lambda handle: 132 * 128,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=141 << 30),
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: "parent",
        nvmlDeviceGetMaxClockInfo=clock,
    )


class HipResult(enum.IntEnum):
    hipSuccess = 0
    hipErrorNoDevice = 100


MI300X = {
    "gcnArchName": b"gfx942:sramecc+:xnack-",
    "name": b"AMD Instinct MI300X",
    "uuid": SimpleNamespace(bytes=b"6f2ab0d1c7d4e5f6"),
    "pciDomainID": 0,
    "pciBusID": 5,
    "pciDeviceID": 0,
    "integrated": 0,
    "multiProcessorCount": 304,
    "warpSize": 64,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiProcessor": 2048,
    "regsPerMultiprocessor": 131072,
    "sharedMemPerBlock": 65536,
    "sharedMemPerBlockOptin": 0,
    "sharedMemPerMultiprocessor": 65536,
    "l2CacheSize": 4 << 20,
    "totalGlobalMem": 192 << 30,
    "clockRate": 2100000,
    "memoryClockRate": 1300000,
    "memoryBusWidth": 8192,
}


def hip_runtime(release: int, facts=MI300X, count=1, version=70226015) -> SimpleNamespace:
    """hip-python as release 7 (the caller brings the struct) or 10 (the call returns it)."""
    ok = HipResult.hipSuccess

    def properties_7(props, ordinal):
        vars(props).update(facts)
        return (ok,)

    def properties_10(ordinal):
        return ok, SimpleNamespace(**facts)

    return SimpleNamespace(
        hipGetDeviceCount=lambda: (ok, count) if count else (HipResult.hipErrorNoDevice, 0),
        hipRuntimeGetVersion=lambda: (ok, version),
        hipDeviceProp_t=SimpleNamespace,
        hipGetDeviceProperties=properties_7 if release == 7 else properties_10,
    )


class LevelZero:
    """A Level Zero loader with an integrated GPU first and a discrete one behind it."""

    UUIDS = (uuid.UUID(int=1), uuid.UUID(int=2))

    def zeInit(self, flags):
        return 0

    def zeDriverGet(self, count, handles):
        return self._handles(count, handles, 1)

    def zeDeviceGet(self, driver, count, handles):
        return self._handles(count, handles, 2)

    def zeDriverGetApiVersion(self, driver, version):
        version._obj.value = 1 << 16 | 6
        return 0

    def zeDriverGetProperties(self, driver, properties):
        properties._obj.driverVersion = 17003456
        return 0

    def zeDeviceGetProperties(self, device, properties):
        index, p = device.value - 1, properties._obj
        p.type, p.flags = level_zero.GPU, level_zero.INTEGRATED if index == 0 else 0
        p.coreClockRate, p.numThreadsPerEU, p.physicalEUSimdWidth = 2850, 8, 16
        p.numEUsPerSubslice, p.numSubslicesPerSlice, p.numSlices = 8, 4, (1, 5)[index]
        p.uuid[:] = self.UUIDS[index].bytes
        p.name = (b"Intel(R) Graphics", b"Intel(R) Arc(TM) B580 Graphics")[index]
        ip = ctypes.cast(p.pNext, ctypes.POINTER(level_zero.IpVersion)).contents
        ip.ipVersion = 20 << 22 | (4, 1)[index] << 14
        return 0

    def zeDeviceGetComputeProperties(self, device, compute):
        c = compute._obj
        c.maxTotalGroupSize, c.maxSharedLocalMemory, c.numSubGroupSizes = 1024, 131072, 2
        c.subGroupSizes[0], c.subGroupSizes[1] = 16, 32
        return 0

    def zeDeviceGetMemoryProperties(self, device, count, memories):
        if memories is not None:
            memories[0].totalSize = 12 << 30
        count._obj.value = 1
        return 0

    def zeDeviceGetCacheProperties(self, device, count, caches):
        if caches is not None:
            caches[0].cacheSize = 18 << 20
        count._obj.value = 1
        return 0

    def _handles(self, count, handles, available):
        if handles is not None:
            for i in range(available):
                handles[i] = i + 1
        count._obj.value = available
        return 0
