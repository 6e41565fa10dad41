"""Where compilers keep what they have compiled: another folder where the usual one cannot be written.

Triton and Inductor raise from deep within a compile when their folder cannot be made (a home below a file, a read-only
root, another user's folder). Found before the first compile, it costs a warm start and nothing else.
"""

from __future__ import annotations

import functools
import getpass
import os
import tempfile
from pathlib import Path

from tcport.logs import logger
from tcport.user_cache import usual_root


def settle_cache_folders() -> tuple[str, ...]:
    """Point each compile cache that cannot be written at a folder that can, for this process and its children.

    Returns:
        One sentence for each that moved; logged once. Asked again, it looks again only if the environment has changed.
    """
    return _settle(
        tuple(os.environ.get(name) for name in (*_FOLDERS, "HOME", "TRITON_HOME", "XDG_CACHE_HOME", "TMPDIR"))
    )


def settle_before_dynamo() -> None:
    """Where the environment names Inductor's folder: importing ``torch._dynamo`` makes it, and raises if it cannot."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        _moved("TORCHINDUCTOR_CACHE_DIR")


def left_folder(variable: str) -> Path | None:
    """The folder that a variable was pointed away from, if it was: what the user has to mend."""
    return _left.get(variable)


_left: dict[str, Path] = {}


@functools.lru_cache(maxsize=8)
def _settle(environment: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple(said for said in map(_moved, _FOLDERS) if said)


def _moved(variable: str) -> str:
    """Point a variable elsewhere if need be, and say so; "" where its folder can be written."""
    try:
        folder = Path(os.environ.get(variable) or _FOLDERS[variable]())
        trouble = _trouble(folder)
        if trouble is None:
            return ""
        other = tempfile.mkdtemp(prefix=f"{variable.lower()}-")
    except OSError as error:
        said = f"{variable} can name no folder, not even a temporary one: {error.strerror or error}."
    else:
        os.environ[variable] = other
        _left[variable] = folder
        said = f"{folder} cannot be written ({trouble}): {variable} is {other} for this process."
    logger("chain").warning("%s", said)
    return said


def _trouble(folder: Path) -> str | None:
    """Why nothing can be written below a folder, which is made if it is not there."""
    if folder.parts[:1] == ("~",):
        return "this user has no home"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _triton() -> Path:
    return Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")


def _inductor() -> Path:
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # a user without a name, as containers have them; torch counts them too
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), f"torchinductor_{user}")


_FOLDERS = {"TRITON_CACHE_DIR": _triton, "TORCHINDUCTOR_CACHE_DIR": _inductor, "TCPORT_CACHE_DIR": usual_root}
