"""Running a table of checks in one subprocess and reading back what each of them said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_MARK = "results: "


def run_in_subprocess(module: str, *arguments: str, **environment: str) -> dict[str, str]:
    """What :func:`report` printed in ``python -m module``: the error of each check by name, "" where there was none."""
    paths = os.pathsep.join([str(_ROOT), str(_ROOT / "ir_tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise RuntimeError(f"{module} ended with {done.returncode} before it reported:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix(_MARK))


def report(checks: Mapping[str, Callable[[], object]]) -> None:
    """Run every check and print the outcome of all for :func:`run_in_subprocess`."""
    outcome = {}
    for name, check in checks.items():
        try:
            check()
            outcome[name] = ""
        except Exception:  # noqa: BLE001 - handed to the parent process, which fails the test with it
            outcome[name] = traceback.format_exc(limit=-6)[-6000:]
    print(_MARK + json.dumps(outcome))
