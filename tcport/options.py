"""What ``torch.compile(..., backend="tcport", mode=..., options=...)`` may say, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from tcport.errors import OptionError

Level = Literal["full", "attention"]
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of one compile.

    Attributes:
        level: ``"full"`` compiles everything; ``"attention"`` rewrites and lowers attention alone and leaves the rest
            eager, for debugging.
        kernel: name of the kernel to use for every attention or cache-write node; None: the best that fits. Of several
            names, Inductor's autotuning chooses, as it does of all that fit under ``mode="max-autotune"``.
        strict: a fallback to a lower link of the chain is an error.
        passes: names of the graph passes to run; None: every registered one.
        disable_passes: names of graph passes to leave out.
        debug: check tables, lengths and slots on every call and poison scratch memory (see :mod:`tcport.debug`).
        pass_fuel: how many passes to run at most, for bisecting; None: all.
        mode: one of ``torch.compile``'s modes.
        inductor: Inductor's own config entries, handed on as they are.
    """

    level: Level = "full"
    kernel: str | tuple[str, ...] | None = None
    strict: bool = False
    passes: tuple[str, ...] | None = None
    disable_passes: tuple[str, ...] = ()
    debug: bool = False
    pass_fuel: int | None = None
    mode: str = "default"
    inductor: tuple[tuple[str, Any], ...] = ()

    @property
    def autotunes(self) -> bool:
        """Whether Inductor's autotuning is asked for."""
        return self.mode.startswith("max-autotune") or bool(dict(self.inductor).get("max_autotune"))

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = Options()
        changed = {name: value for name, value in changed.items() if value != getattr(defaults, name)}
        if "inductor" in changed:
            changed["inductor"] = dict(self.inductor)
        return changed


def parse_options(
    mode: str | None, options: Mapping[str, Any] | None, inductor_names: Callable[[], Iterable[str]] = tuple
) -> Options:
    """Check a mode and an options dict.

    Args:
        mode: as given to ``torch.compile``.
        options: tcport's own options, and any of Inductor's config entries.
        inductor_names: the names of Inductor's config entries; called only for a key that is not tcport's own.

    Raises:
        OptionError: an unknown mode or key (close matches are named), or a value of the wrong kind.
    """
    mode = mode or "default"
    if mode not in MODES:
        raise OptionError(f"mode={mode!r} is not one of {', '.join(MODES)}.", _suggest(mode, MODES))
    own: dict[str, Any] = {}
    handed_on: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key in _CHECKS:
            own[key] = _CHECKS[key](key, value)
        elif key in (known := set(inductor_names())):
            handed_on[key] = value
        else:
            raise OptionError(f"Unknown option {key!r}.", _suggest(key, [*_CHECKS, *sorted(known)]))
    return Options(**own, mode=mode, inductor=tuple(sorted(handed_on.items())))


def _suggest(given: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(str(given), known, n=3)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"Options of tcport: {', '.join(_CHECKS)}; Inductor's config entries are accepted too."


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        if value not in allowed:
            raise OptionError(f"Option {key!r} is {value!r}.", f"Give one of {', '.join(map(repr, allowed))}.")
        return value

    return check


def _is_bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"Option {key!r} is {value!r}.", "Give True or False.")
    return value


def _is_kernels(key: str, value: Any) -> str | tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise OptionError(f"Option {key!r} is {value!r}.", "Give a kernel's name, or a list of names.")
    return value if isinstance(value, str) else names


def _is_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"Option {key!r} is {value!r}.", "Give a whole number from 0 up.")
    return value


def _is_names(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"Option {key!r} is {value!r}.", "Give a list of pass names.")
    names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise OptionError(f"Option {key!r} holds something other than strings: {value!r}.", "Give pass names.")
    return names


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "level": _one_of("full", "attention"),
    "kernel": _is_kernels,
    "strict": _is_bool,
    "debug": _is_bool,
    "passes": _is_names,
    "disable_passes": _is_names,
    "pass_fuel": _is_count,
}
