"""Run the tests of the CPU's C++ kernels under address and undefined-behaviour sanitizers: ``.ci/sanitize.py ARGS``.

ARGS are pytest's; without any, all tests of the kernels run, and the cases that every kernel has to meet. The library
is built anew for it, beside the usual one. What a sanitizer finds ends the process with its report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1 -O1"
FILES = (
    "test_cpu_kernel.py",
    "test_cases_a1_a9.py",
    "test_case_a4.py",
    "test_remembered.py",
    "test_remembered_changes.py",
)
# Compiled code calls the same kernels; compiling it with a sanitizer in the compiler takes minutes.
TESTS = [*(f"ir_tests/{name}" for name in FILES), "-q", "-k", "not compiled"]


def main(arguments: list[str]) -> int:
    compiler = os.environ.get("CXX") or "g++"
    # Python itself is not instrumented: the runtimes must be in the process before anything else is.
    runtimes = [run_for_output([compiler, f"-print-file-name={name}"]) for name in ("libasan.so", "libubsan.so")]
    missing = [name for name in runtimes if not Path(name).is_absolute()]
    if missing:
        raise SystemExit(f"{compiler} has no {' and no '.join(missing)}: install the compiler's sanitizer libraries.")
    environment = {
        **os.environ,
        "CXX": compiler,
        "TCPORT_CXXFLAGS": FLAGS,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    build = "from tcport.kernels import cpu_library; print(cpu_library.build())"
    subprocess.run([sys.executable, "-c", build], check=True, env=environment)
    environment["LD_PRELOAD"] = " ".join(runtimes)
    return subprocess.run([sys.executable, "-m", "pytest", *(arguments or TESTS)], cwd=ROOT, env=environment).returncode


def run_for_output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
