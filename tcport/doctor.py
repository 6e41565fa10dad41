"""``python -m tcport doctor``: whether this machine can run tcport, what is missing, and what to do about it.

Each check stands alone and turns whatever it meets into a finding: the tool that explains a broken machine must not
break on it.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "note", "fault"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        state: ``ok``; ``note``: tcport runs, with less; ``fault``: something a user would trip over.
        detail: what is there.
        remedy: what to do, empty when all is well.
    """

    name: str
    state: State
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run every check. Takes seconds: the last one compiles and runs a small attention."""
    return [_guarded(name, check) for name, check in _CHECKS]


def healthy(findings: list[Finding]) -> bool:
    """Whether there is no fault among the findings."""
    return not any(finding.state == "fault" for finding in findings)


def _guarded(name: str, check: Callable[[str], Finding]) -> Finding:
    try:
        return check(name)
    except Exception as error:  # noqa: BLE001  (recorded: it is the finding)
        return Finding(name, "fault", f"the check itself failed: {type(error).__name__}: {error}", "Report this.")


def _torch(name: str) -> Finding:
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= release < (2, 15):
        return Finding(name, "fault", torch.__version__, "Install a torch from 2.11 up to 2.14.")
    return Finding(name, "ok", torch.__version__)


def _triton(name: str) -> Finding:
    from tcport.fingerprint import triton_version

    version = triton_version()
    if version == "none":
        return Finding(name, "note", "not installed", "GPU kernels need it: pip install triton. The CPU does not.")
    try:
        importlib.import_module("triton")
    except Exception as error:  # noqa: BLE001  (recorded: it is the finding)
        return Finding(name, "fault", f"{version}, but importing it fails: {error}", "Reinstall triton.")
    return Finding(name, "ok", version)


def _entry_point(name: str) -> Finding:
    points = metadata.entry_points(group="torch_dynamo_backends")
    if not any(point.name == "tcport" for point in points):
        return Finding(
            name,
            "note",
            "torch.compile does not know the name 'tcport'",
            "Install the package (pip install .), or pass backend=tcport.backend.tcport.",
        )
    return Finding(name, "ok", "torch.compile(..., backend='tcport')")


def _devices(name: str) -> Finding:
    from tcport.device import device_profile

    profile = device_profile()
    text = f"{profile.name or profile.arch or 'unnamed'} ({profile.vendor})"
    if profile.basic_mode:
        return Finding(name, "note", f"{text}, basic mode: {profile.basic_mode}", "Update the driver or the runtime.")
    if profile.vendor == "cpu":
        return Finding(name, "note", f"{text}; no GPU that torch can use", "Fine if that is what you have.")
    return Finding(name, "ok", text)


def _compiler(name: str) -> Finding:
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted) or shutil.which("clang++")
    if found is None:
        return Finding(
            name,
            "fault",
            f"no C++ compiler ({wanted}) on the PATH",
            "Install g++, or set CXX: Inductor needs it on a CPU, and Triton a C compiler for its launcher.",
        )
    return Finding(name, "ok", found)


def _cpu_kernels(name: str) -> Finding:
    from tcport import bundle  # noqa: F401  (a bundle may have the kernels)
    from tcport.kernels import cpu_library

    outlook = cpu_library.outlook()
    if outlook.startswith("none"):
        return Finding(name, "note", outlook, "Install g++, or load a bundle that has them (TCPORT_BUNDLE).")
    return Finding(name, "ok", outlook)


def _headers(name: str) -> Finding:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return Finding(name, "note", f"{header} is not there", "Triton's launcher needs it: install python3-dev.")
    return Finding(name, "ok", str(header))


def _cache(variable: str, default: Callable[[], Path]) -> Callable[[str], Finding]:
    def check(name: str) -> Finding:
        from tcport.cache_folders import left_folder

        path = left_folder(variable) or Path(os.environ.get(variable) or default())
        problem = _unwritable(path)
        if problem:
            return Finding(name, "fault", f"{path}: {problem}", f"Set {variable} to a folder that can be written.")
        return Finding(name, "ok", str(path))

    return check


def _unwritable(path: Path) -> str | None:
    """Why nothing can be written below ``path``; None if something can. The path is left as it was found."""
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _inductor_default() -> Path:
    import getpass

    return Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"


def _triton_default() -> Path:
    return Path(os.environ.get("TRITON_HOME", os.path.expanduser("~"))) / ".triton" / "cache"


def _attention(name: str) -> Finding:
    """The whole way once: eager, compiled, compared."""
    import torch

    from tcport.backend import tcport as backend
    from tcport.explainer import explain
    from tcport.kernels import reference
    from tcport.ops import paged_attention

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    query = torch.randn(2, 4, 16, device=device)
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16, device=device)
    table = torch.tensor([[4, 1], [0, 3]], device=device)
    lens = torch.tensor([3, 8], device=device)

    def attend(q: torch.Tensor) -> Any:
        return paged_attention(q, k_cache, v_cache, table, lens)

    report = explain(attend, query)
    want, _ = reference.paged_attention(*(t.cpu() for t in (query, k_cache, v_cache, table, lens)))
    for path, result in (("eager", attend(query)), ("compiled", torch.compile(attend, backend=backend)(query))):
        gap = (result.cpu() - want).abs().max().item()
        if not gap < 1e-3:
            return Finding(name, "fault", f"{path} attention is off by {gap:.2g}", "Report this with the output above.")
    node = report.nodes[0]
    return Finding(name, "ok", f"eager and compiled agree with the reference; kernel {node.kernel} [{node.tier}]")


_CHECKS: tuple[tuple[str, Callable[[str], Finding]], ...] = (
    ("python", lambda name: Finding(name, "ok", sys.version.split()[0])),
    ("torch", _torch),
    ("triton", _triton),
    ("backend name", _entry_point),
    ("device", _devices),
    ("C++ compiler", _compiler),
    ("CPU kernels", _cpu_kernels),
    ("Python headers", _headers),
    ("Inductor cache", _cache("TORCHINDUCTOR_CACHE_DIR", _inductor_default)),
    ("Triton cache", _cache("TRITON_CACHE_DIR", _triton_default)),
    ("attention", _attention),
)
