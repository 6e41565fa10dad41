"""The C++ kernels of ``kernels/cpu``: built with the machine's compiler at first use, then loaded from a cache.

The library registers ``tcport_cpu::paged_attention`` and ``tcport_cpu::kv_write`` as C++ operators against torch's
stable ABI, so compiled code calls them without Python, and building them needs no more of torch than a few headers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tcport.errors import KernelBuildError
from tcport.user_cache import cache_folder

SOURCES = Path(__file__).resolve().parent / "cpu"

_NAME = "libtcport_cpu.so"
_ABI = "0x020b000000000000"  # torch 2.11, the oldest whose stable ABI has all that is used

_X86 = ["-mavx2", "-mfma", "-mf16c"]
_X86_512 = [*_X86, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
_X86_BF16 = [*_X86_512, "-mavx512bf16"]
_ISA_FLAGS = {
    "baseline": [],
    "avx2": _X86,
    "avx512": _X86_512,
    "avx512_bf16": _X86_BF16,
    "avx512_amx": [*_X86_BF16, "-mamx-tile", "-mamx-bf16"],
}
_FLAGS = ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Loop unswitching multiplies the code of the softmax by its options. The warnings are about GCC's own intrinsics.
_KERNEL_FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math"]
_GCC_FLAGS = ["-fno-unswitch-loops", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]


@dataclasses.dataclass(frozen=True)
class CpuLibrary:
    """The loaded library.

    Attributes:
        path: its file.
        digest: of its sources, the torch version and the flags it was built with.
    """

    path: Path
    digest: str

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run, such as ``avx512_bf16``."""
        return _functions(self.path).tcport_cpu_isa().decode()

    def select(self, isa: str) -> bool:
        """Use the kernels of another instruction set; empty: the best. False where this processor lacks it."""
        return _functions(self.path).tcport_cpu_select(isa.encode())


def load() -> CpuLibrary:
    """The kernels, built if need be. A failure is remembered: it is not tried again until libraries built ahead change.

    Raises:
        KernelBuildError: there is no compiler, it failed, or what it built cannot be loaded.
    """
    result = _loaded or _load_once(_built_ahead(identity()))
    if isinstance(result, KernelBuildError):
        raise KernelBuildError(result.cause, result.remedy)
    return result


def look_first(built_ahead: Callable[[str], Path | None]) -> None:
    """Set who is asked, before the cache and the compiler, for the file of a library with a certain identity."""
    global _built_ahead
    _built_ahead = built_ahead


def build(folder: Path | None = None) -> Path:
    """The library's file, compiled unless an equal one is in the cache.

    Args:
        folder: where to keep it; None: the user's cache. Processes may race: one builds, the others wait for it.

    Raises:
        KernelBuildError: as :func:`load`.
    """
    compiler = _compiler()
    built = _place(compiler, folder)
    if built is not None and _is_whole(built):
        return built
    if built is None or compiler is None:
        raise KernelBuildError(
            "No C++ compiler is on the PATH, and the cache holds no CPU kernels for this version.",
            "Install g++, or name one in CXX; until then attention on the CPU runs as plain PyTorch.",
        )
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with _locked(built.parent / "lock"):
            if not _is_whole(built):
                _compile(compiler, built)
    except OSError as error:
        raise KernelBuildError(
            f"The CPU kernels cannot be built in {built.parent}: {error}.",
            "Set TCPORT_CACHE_DIR to a folder that can be written.",
        ) from error
    return built


def kernel_flags(isa: str, compiler: str) -> list[str]:
    """What a compiler needs to be told to make the kernels of one instruction set."""
    gcc = [] if "clang" in Path(compiler).name else _GCC_FLAGS
    return [*_KERNEL_FLAGS, *gcc, f"-DTCPORT_ISA={isa}", *_ISA_FLAGS[isa]]


def outlook() -> str:
    """Which kernels the CPU has or will have, in words; nothing is built or loaded."""
    ahead, compiler = _built_ahead(identity()), _compiler()
    built = ahead or _place(compiler)
    if built is not None and _is_whole(built):
        return f"built: {built}"
    if compiler is None:
        return "none: there is no C++ compiler, so attention runs as plain PyTorch"
    return f"will be built at first use by {' '.join(compiler)}"


def state() -> str:
    """What a compiled graph depends on: the library that will run, or why there is none."""
    try:
        library = load()
    except KernelBuildError as error:
        return f"none: {error}"
    return f"{library.digest} {library.isa}"


_loaded: CpuLibrary | None = None


def _nothing_ahead(identity: str) -> Path | None:
    return None


_built_ahead: Callable[[str], Path | None] = _nothing_ahead


@functools.lru_cache(maxsize=8)
def _load_once(ahead: Path | None) -> CpuLibrary | KernelBuildError:
    global _loaded
    if ahead is not None and (error := _load_file(ahead)):
        warnings.warn(str(error), stacklevel=2)
        ahead = None
    try:
        path = ahead or build()
    except KernelBuildError as error:
        return error
    if ahead is None and (error := _load_file(path)):
        return error
    torch.library.register_fake("tcport_cpu::paged_attention", _fake_attention)
    torch.library.register_fake("tcport_cpu::kv_write", lambda *args: None)
    library = CpuLibrary(path, identity())
    wanted = os.environ.get("TCPORT_CPU_ISA", "")
    if not library.select(wanted):
        return KernelBuildError(
            f"TCPORT_CPU_ISA is {wanted!r}, and this processor has no such kernels.",
            f"Unset it, or choose of {', '.join(_ISA_FLAGS)} what the processor has.",
        )
    _loaded = library
    return library


def _load_file(path: Path) -> KernelBuildError | None:
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return KernelBuildError(
            f"The CPU kernels in {path} cannot be loaded: {error}.", "Remove the file and try again."
        )
    return None


def _fake_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return_lse = args[14]
    lse_shape = query.shape[:-1] if return_lse else (0,)
    out = query.new_empty((*query.shape[:-1], v_cache.shape[-1]))
    return out, query.new_empty(lse_shape, dtype=torch.float32)


@functools.lru_cache(maxsize=1)
def _functions(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.tcport_cpu_isa.restype = ctypes.c_char_p
    library.tcport_cpu_select.argtypes = [ctypes.c_char_p]
    library.tcport_cpu_select.restype = ctypes.c_bool
    return library


def _compiler() -> list[str] | None:
    """The compiler's command: ``CXX``, which may hold arguments, or the first of the usual names on the PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else None
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def _compiler_identity(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return hashlib.sha256(f"{compiler} {version}".encode()).hexdigest()[:16]


def _place(compiler: list[str] | None, folder: Path | None = None) -> Path | None:
    """Where a compiler's library lies; without a compiler, any that was built before."""
    root = (cache_folder("cpu") if folder is None else folder) / identity()
    if compiler:
        return root / _compiler_identity(compiler) / _NAME
    return next((built for built in root.glob(f"*/{_NAME}") if _is_whole(built)), None)


def _is_whole(built: Path) -> bool:
    """Whether a file is what was built. One that was cut short ends the process that loads it (SIGBUS)."""
    try:
        return _digest_file(built).read_text() == hashlib.sha256(built.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _digest_file(built: Path) -> Path:
    return built.with_name(f"{built.name}.sha256")


@functools.lru_cache(maxsize=1)
def identity() -> str:
    """Digest of the sources, the torch version, the machine's architecture and the flags."""
    parts = [torch.__version__, platform.machine(), platform.libc_ver()[0], _ABI, repr(_extra_flags())]
    parts += [repr(flags) for flags in (_ISA_FLAGS, _FLAGS, _KERNEL_FLAGS, _GCC_FLAGS)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _extra_flags() -> list[str]:
    """Flags of the user's, for the compiler and the linker: a sanitizer, a debugger's symbols."""
    return shlex.split(os.environ.get("TCPORT_CXXFLAGS", ""))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes, where the file system has locks; elsewhere they build side by side."""
    with path.open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # publishing by rename keeps two builders out of each other's way
        yield


def _compile(compiler: list[str], built: Path) -> None:
    """Compile all files side by side, link, and publish by renaming, so that a reader never sees half a library."""
    if sys.platform == "win32":
        raise KernelBuildError("The CPU kernels are not built on Windows.", "Attention runs as plain PyTorch there.")
    torch_root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        jobs = []
        for source in sorted(SOURCES.glob("*.cpp")):
            if source.name != "kernels.cpp":
                flags = ["-std=c++17", "-O2", f"-DTORCH_TARGET_VERSION={_ABI}", f"-isystem{torch_root / 'include'}"]
                jobs.append((source, flags, f"{scratch}/{source.stem}.o"))
        for isa in _ISA_FLAGS:
            if isa == "baseline" or platform.machine() in ("x86_64", "AMD64"):
                flags = kernel_flags(isa, compiler[0])
                jobs.insert(0, (SOURCES / "kernels.cpp", flags, f"{scratch}/kernels_{isa}.o"))
        progress = _Progress(len(jobs) + 1)

        def compile_one(job: tuple[Path, list[str], str]) -> None:
            source, flags, target = job
            _run([*compiler, *_FLAGS, *flags, *_extra_flags(), "-c", str(source), "-o", target])
            progress.step()

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as pool:
            list(pool.map(compile_one, jobs))
        link = ["-shared"] if sys.platform != "darwin" else ["-dynamiclib", "-undefined", "dynamic_lookup"]
        link += [target for _, _, target in jobs]
        link += [f"-L{torch_root / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{torch_root / 'lib'}", "-lm"]
        _run([*compiler, *_extra_flags(), *link, "-o", f"{scratch}/{_NAME}"])
        digest = Path(scratch, "sha256")
        digest.write_text(hashlib.sha256(Path(scratch, _NAME).read_bytes()).hexdigest())
        os.replace(digest, _digest_file(built))
        os.replace(f"{scratch}/{_NAME}", built)
        progress.step()


def _run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's, say
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        told = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise KernelBuildError(
            f"{command[0]} could not build the CPU kernels: {told}.", "Name another compiler in CXX, such as g++ 11."
        )


class _Progress:
    """One line on stderr, rewritten on a terminal, so that a first call that takes half a minute says why."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._start = steps, 0, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._show()

    def step(self) -> None:
        self._done += 1
        if self._terminal or self._done == self._steps:
            self._show()

    def _show(self) -> None:
        text = f"tcport: building the CPU kernels, once for this machine: {self._done} of {self._steps}"
        text += f", {time.monotonic() - self._start:.0f} s"
        last = self._done == self._steps
        print(("\r" if self._terminal else "") + text, end="\n" if last or not self._terminal else "", file=sys.stderr)
