"""Patterns: a fusion as two plain functions, what they match and what takes its place.

    from tcport.pattern import Pattern, number, tensor

    def spelled_out(x, eps):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    norm = Pattern(spelled_out, torch.ops.mine.norm, x=tensor("... d"), eps=number())

    @tcport.register_pass(name="fuse_norm", before=("select_tiles",))
    def fuse_norm(graph, ctx):
        return norm.rewrite(graph, ctx)

A match may have its operands commuted, and no-op views between its parts: views, reshapes and transposes that together
change nothing, casts to the dtype a value has, dropout that drops nothing. Everything else must be as traced, down to
constants and sizes. What looks like a match and is none is left as it is, and the compile's report says why:

* a guard refuses it;
* something else uses a value that would no longer be computed; a value the pattern returns may have other users;
* the graph writes to memory between the first part and the last;
* the replacement has another shape, stride or dtype.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.fx

from tcport.errors import PatternError
from tcport.graph_pass import PassContext

_DIM = re.compile(r"\d*[A-Za-z_]\w*")
FLOATING = (torch.float32, torch.float16, torch.bfloat16)

Function = Callable[..., Any]
Guard = Callable[["Bindings"], "str | None"]
"""Says why a match is not taken, or None where it is."""


@dataclasses.dataclass(frozen=True)
class Wildcard:
    """What a parameter of a pattern stands for; made by :func:`tensor` and :func:`number`.

    Attributes:
        dims: names of a tensor's dimensions, of which the first may be ``"..."``; None: a number.
        dtypes: those it may have.
    """

    dims: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...] = ()

    def __repr__(self) -> str:
        if self.dims is None:
            return "number()"
        return f"tensor({' '.join(self.dims)!r}{f', {list(self.dtypes)}' if self.dtypes else ''})"


def tensor(dims: str = "...", dtypes: torch.dtype | Sequence[torch.dtype] | None = None) -> Wildcard:
    """A wildcard for a tensor.

    Args:
        dims: its dimensions by name, ``"tokens heads dim"``; a name that several wildcards bear is one size. A leading
            ``...`` stands for any number of dimensions, the same ones wherever it is written; a leading ``*`` for any
            that broadcast. ``2d`` is twice the size called ``d``.
        dtypes: the dtypes it may have. None: fp32, fp16 or bf16, the same one for every such wildcard of a pattern.

    Raises:
        PatternError: the dimensions or the dtypes are not written so.
    """
    given = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes or ())
    if not all(isinstance(dtype, torch.dtype) for dtype in given):
        raise PatternError(f"A wildcard has the dtypes {dtypes!r}.", "Give torch.dtype's, such as torch.float32.")
    names = tuple(dims.split())
    if not all(_DIM.fullmatch(dim) for dim in names[names[:1] in (("...",), ("*",)) :]):
        raise PatternError(
            f"A wildcard has the dimensions {dims!r}.",
            "Give names, behind '...' or '*' if need be: 'tokens heads d', '... d', '... 2d'.",
        )
    return Wildcard(names, given)


def number() -> Wildcard:
    """A wildcard for a floating-point number that is written into the graph, such as an epsilon."""
    return Wildcard(None)


@dataclasses.dataclass(frozen=True)
class Bindings:
    """What the wildcards of one match stand for.

    Attributes:
        nodes: by parameter: a graph node, or the number itself.
        root: the node that computes the pattern's last result.
    """

    nodes: dict[str, Any]
    root: torch.fx.Node

    def __getitem__(self, name: str) -> Any:
        """The fake value of a tensor, or the number."""
        bound = self.nodes[name]
        return bound.meta["val"] if isinstance(bound, torch.fx.Node) else bound


class Engine(Protocol):
    """Finds and replaces patterns; ``tcport.pattern_engine`` has the one over Inductor's matcher."""

    def rewrite(self, pattern: Pattern, graph: torch.fx.Graph, ctx: PassContext) -> int: ...

    def find(self, pattern: Pattern, node: torch.fx.Node) -> Any: ...

    def python(self, pattern: Pattern, dtype: torch.dtype) -> str: ...


_engines: list[Engine] = []


def use_engine(engine: Engine) -> None:
    """Name what finds patterns; the layer that may import Inductor does so."""
    _engines[:] = [engine]


def _parameters(function: Function) -> tuple[str, ...] | None:
    """The names of a function's parameters; None: it does not say, as operators and builtins do not."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return None
    return None if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()) else tuple(parameters)


class Pattern:
    """What to look for, and what to put in its place.

    Args:
        search: a function of the wildcards, in torch or aten operations, that returns a tensor, or a tuple of tensors
            the last of which is computed from the others. Several functions are several spellings of one thing.
        replace: a function of these parameters, or of some of them, by name, with the same results; an operator or a
            builtin is given all of them in the order in which the first spelling has them.
        guards: further conditions on a match; see :data:`Guard`.
        **wildcards: a :class:`Wildcard` for each parameter.

    Raises:
        PatternError: a parameter has no wildcard, or a wildcard no parameter; or an argument is of the wrong kind.
    """

    def __init__(
        self,
        search: Function | Iterable[Function],
        replace: Function,
        *,
        guards: Sequence[Guard] = (),
        **wildcards: Wildcard,
    ) -> None:
        self.spellings: tuple[Function, ...] = (search,) if callable(search) else tuple(search)
        self.replace = replace
        if callable(guards) or not all(map(callable, guards)):
            raise PatternError(f"The pattern {self.name} has guards={guards!r}.", "Give a tuple of functions.")
        if strange := [name for name, wildcard in wildcards.items() if not isinstance(wildcard, Wildcard)]:
            raise PatternError(
                f"The pattern {self.name} has {strange[0]}={wildcards[strange[0]]!r}, which is no wildcard.",
                "Give tensor('... d') or number(), of tcport.pattern.",
            )
        self.guards = tuple(guards)
        self.wildcards = wildcards
        self.order = _parameters(replace)
        self.traced: dict[Any, Any] = {}  # the engine's, by dtype
        # Likewise, by a compile's fake mode.
        self.retraced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        for function in self.spellings:
            parameters = _parameters(function)
            if parameters is None or set(parameters) != set(wildcards):
                raise PatternError(
                    f"The pattern {function.__name__} has the parameters {', '.join(parameters or ('?',))}, and "
                    f"wildcards are given for {', '.join(wildcards) or 'none'}.",
                    "Give each parameter one wildcard, such as x=tensor('... d').",
                )
            if self.order is None:
                self.order = parameters
        if unknown := set(self.order or ()) - set(wildcards):
            raise PatternError(
                f"The replacement of the pattern {self.name} has the parameters {', '.join(self.order or ())}, and the "
                f"pattern has no {' and no '.join(sorted(unknown))}.",
                "Name the parameters of the replacement as those of the pattern.",
            )

    @property
    def name(self) -> str:
        """The name of its first spelling."""
        return self.spellings[0].__name__

    def rewrite(self, graph: torch.fx.Graph, ctx: PassContext) -> int:
        """Replace every match; returns their number. What looks like a match and is left is told to ``ctx``."""
        return self._engine().rewrite(self, graph, ctx)

    def find(self, node: torch.fx.Node) -> Any:
        """The match whose last result a node computes, a :class:`tcport.pattern_match.Found`.

        A string says why what looks like a match is none; None: it does not look like one.
        """
        return self._engine().find(self, node)

    def python(self, dtype: torch.dtype = torch.float32) -> str:
        """The pattern as readable Python, one section a spelling, as traced with tensors of a dtype."""
        return self._engine().python(self, dtype)

    def dtypes(self, present: Collection[torch.dtype]) -> tuple[torch.dtype, ...]:
        """The dtypes to trace it with, for values of the dtypes that are present.

        Those that wildcards without dtypes of their own may share; where there are none, any one stands for all.
        """
        free = any(w.dims is not None and not w.dtypes for w in self.wildcards.values())
        return tuple(dtype for dtype in FLOATING if dtype in present) if free else FLOATING[:1]

    def _engine(self) -> Engine:
        if not _engines:
            raise PatternError(
                "Nothing that finds patterns is loaded.",
                "Import tcport.backend or tcport.testing first; in a compile it is loaded already.",
            )
        return _engines[0]

    def __repr__(self) -> str:
        """Stable from process to process, so that a pass may have it among its parameters."""
        return f"Pattern({', '.join(f.__qualname__ for f in self.spellings)} -> {self.wildcards})"
