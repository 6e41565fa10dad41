"""Test the C++ kernels for processors that this machine is not: ``.ci/emulate.py [baseline] [amx] [neon]``.

The kernels of each instruction set, all unless told, are compiled with a small program that compares them with
attention in fp64 (``emulate.cpp``). ``neon`` is compiled for AArch64 and run by QEMU; ``amx`` has plain code for its
tile instructions and runs on a processor that has the rest of it, AVX-512 BF16; ``baseline`` runs anywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tcport.kernels import cpu_library  # noqa: E402

NATIVE = os.environ.get("CXX") or "g++"
TARGETS = {
    "baseline": ("baseline", [NATIVE], []),
    "amx": ("avx512_amx", [NATIVE, "-DTCPORT_EMULATE_AMX"], []),
    "neon": ("baseline", ["aarch64-linux-gnu-g++", "-static"], ["qemu-aarch64"]),
}


def main(names: list[str]) -> int:
    return max(check(*TARGETS[name]) for name in names or TARGETS)


def check(isa: str, compiler: list[str], emulator: list[str]) -> int:
    """Build the program for one instruction set and run it; not 0 where a case is wrong."""
    flags = [flag for flag in cpu_library.kernel_flags(isa, compiler[0]) if not flag.startswith("-mamx")]
    sources = [str(cpu_library.SOURCES / name) for name in ("kernels.cpp", "plan.cpp")]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/check"
        command = [*compiler, *flags, f"-I{cpu_library.SOURCES}", *sources, str(ROOT / ".ci" / "emulate.cpp")]
        subprocess.run([*command, "-o", program], check=True)
        return subprocess.run([*emulator, program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
