"""What a visibility formula says in the canonical operator's terms: lengths, causality, a window, chunks, and a rest.

A token at position q sees key j when every conjunct holds. The conjuncts that bound j become arguments:

* ``j < U(sequence)`` is a length;
* ``j <= A(sequence) + s`` for query token s of S is causality, with A + S keys in the sequence;
* ``j > q - W`` is a window of W keys, where q is the position that the length or causality gives the token;
* ``j // C == q // C`` is a chunk.

Whatever else restricts j is passed on as a bool mask, exactly as it stands. So is a bound that counts from an end which
may lie past the gathered keys: the mask is cut there, and a length that is cut as well moves every position.
"""

from __future__ import annotations

import dataclasses

import sympy

from tcport.adapter.algebra import Expr, FloorDiv, Read, Space, equal
from tcport.adapter.booleans import FALSE, TRUE, AtLeastZero, Formula, all_of, conjuncts, expressions
from tcport.adapter.lengths import Fits
from tcport.adapter.report import Rejected


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Arguments of the canonical operator that say which keys a token sees.

    Attributes:
        lengths: keys per sequence: the smallest of these, per sequence.
        longest: when set, keys per sequence are its largest value over the query tokens instead.
        causal, window, chunk: as the operator takes them.
        rest: what a bool mask has to say on top; TRUE for no mask.
        capped: whether lengths beyond the gathered keys mean the gathered keys; False where there are none.
        needs: sizes that must not be negative for all this to hold, each with the reason to give when one is.
    """

    lengths: tuple[Expr, ...]
    longest: Expr | None = None
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    rest: Formula = TRUE
    capped: bool = True
    needs: tuple[tuple[Expr, str], ...] = ()


def visibility(
    space: Space, formula: Formula, key: Expr, keys: Expr, token: Expr, tokens: Expr, fits: Fits
) -> Visibility:
    """Translate a formula over sequence coordinates, ``token`` and ``key``.

    Args:
        space: the ranges of the coordinates.
        formula: when query token ``token`` sees key ``key``.
        key: coordinate of the key, over ``keys`` gathered positions.
        token: coordinate of the query token within its sequence, over ``tokens``; 0 when there is one.
        fits: whether the end of what a token sees is certain to be at most ``keys``.

    Raises:
        Rejected: a token that sees nothing at all (rule ``mask``).
    """
    if formula == FALSE:
        raise Rejected("mask", "the mask hides every key")
    upper, lower, rest = [], [], []
    for part in conjuncts(formula):
        bound = _bound(space, part, key)
        if bound is None:
            rest.append(part)
        elif bound[0] == "upper":
            if not space.at_least(bound[1], keys):  # a bound past the last key bounds nothing
                upper.append((part, bound[1]))
        elif not space.at_least(sympy.Integer(0), bound[1]):
            lower.append((part, bound[1]))

    if token == 0:
        found = Visibility(tuple(dict.fromkeys(u for _, u in upper)) or (keys,))
        ends = [u for _, u in upper]
    else:
        found, ends, kept = _many_tokens(space, upper, keys, token, tokens, fits)
        rest += kept
    return _lower(space, found, ends, lower, rest, key, fits)


def _many_tokens(
    space: Space, upper: list[tuple[Formula, Expr]], keys: Expr, token: Expr, tokens: Expr, fits: Fits
) -> tuple[Visibility, list[Expr], list[Formula]]:
    """Several query tokens per sequence: at most one bound can be the operator's causality."""
    plain = [(part, u) for part, u in upper if not u.has(token)]
    steps = [(part, u) for part, u in upper if not sympy.expand(u - token).has(token)]
    other = [(part, u) for part, u in upper if (part, u) not in plain and (part, u) not in steps]
    if steps:
        first = steps[0][1]
        start = sympy.expand(first - token - 1)
        end = sympy.expand(start + tokens)
        if end.has(Read) and not fits(end):
            lengths = tuple(dict.fromkeys((end, *(u for _, u in plain))))
            return Visibility(lengths, causal=False), [], [part for part, _ in (*steps, *other)]
        kept = [part for part, _ in steps[1:]] + [part for part, _ in other]
        kept += [part for part, u in plain if not space.at_least(u, end) and not equal(u, end)]
        needs = ()
        if not end.has(Read) and not space.at_least(keys, end):
            needs = ((keys - end, f"a causal mask from position {start} may reach past the {keys} gathered keys"),)
        return Visibility((end,), causal=True, capped=False, needs=needs), [first], kept
    if plain:
        lengths = tuple(dict.fromkeys(u for _, u in plain))
        return Visibility(lengths, causal=False), [], [part for part, _ in other]
    longest = other[0][1] if len(other) == 1 else None
    return Visibility((keys,), longest=longest, causal=False), [], [part for part, _ in other]


def _lower(
    space: Space,
    found: Visibility,
    ends: list[Expr],
    lower: list[tuple[Formula, Expr]],
    rest: list[Formula],
    key: Expr,
    fits: Fits,
) -> Visibility:
    """Windows and chunks count from the token's position, which is one less than the only end of what it sees.

    From the last key on they hide less than from an end past it, so there they save work and the mask does the rest.
    """
    end = ends[0] if len(set(ends)) == 1 else None
    window, exact = None, list(rest)
    for part, start in lower:
        width = None if end is None else sympy.expand(end - start)
        if width is not None and width.is_Integer and width >= 1:
            window = int(width) if window is None else min(window, int(width))
        else:
            rest.append(part)
    chunk, rest = (None, rest) if end is None else _chunk(space, rest, key, sympy.expand(end - 1))
    if end is None or (window is None and chunk is None):
        return dataclasses.replace(found, rest=all_of(*rest))
    inside = not found.capped or fits(end)
    kept = rest if inside else [*exact, *(part for part, _ in lower)]
    return dataclasses.replace(found, window=window, chunk=chunk, rest=all_of(*kept), capped=not inside)


def _bound(space: Space, part: Formula, key: Expr) -> tuple[str, Expr] | None:
    """``("upper", U)`` for key < U, ``("lower", L)`` for key >= L; None for anything else."""
    if not isinstance(part, AtLeastZero):
        return None
    weight = part.expr.coeff(key)
    other = sympy.expand(part.expr - weight * key)
    if other.has(key):
        return None
    if weight == -1:
        return "upper", sympy.expand(other + 1)
    if weight == 1:
        return "lower", sympy.expand(-other)
    return None


def _chunk(space: Space, rest: list[Formula], key: Expr, position: Expr) -> tuple[int | None, list[Formula]]:
    """Find ``key // C == position // C``, which arrives as two inequalities."""
    for part in rest:
        if not isinstance(part, AtLeastZero):
            continue
        for quotient in part.expr.atoms(FloorDiv):
            size = quotient.args[1]
            if quotient.args[0] != key or not size.is_Integer:
                continue
            difference = sympy.expand(quotient - space.floordiv(position, size))
            pair = [AtLeastZero(difference), AtLeastZero(sympy.expand(-difference))]
            if all(side in rest for side in pair):
                return int(size), [p for p in rest if p not in pair]
    return None, rest


def symbols_in(space: Space, formula: Formula) -> set[Expr]:
    """The coordinates a formula depends on."""
    return set(space.symbols_of(*expressions(formula)))
