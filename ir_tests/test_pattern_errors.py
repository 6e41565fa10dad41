"""Patterns that are none, and graphs that none is looked for in: each an error that says what to do."""

from __future__ import annotations

import pytest
import torch
from test_patterns import X, Y, as_hypot, as_hypot_of, gated, matches
from torch import Tensor

from tcport.errors import PatternError
from tcport.pattern import Pattern, tensor
from tcport.testing import capture, run_pass


def torch_neg(x: Tensor) -> Tensor:
    return torch.neg(x)


def test_patterns_that_are_none() -> None:
    with pytest.raises(PatternError, match="gated has the parameters gate, up, and wildcards are given for gate"):
        Pattern(gated, as_hypot, gate=tensor())
    unconnected = Pattern(lambda x: (x.neg(), x.exp()), lambda x: (x, x), x=tensor())
    with pytest.raises(PatternError, match="returns a value that its last result is not computed from"):
        matches(unconnected, lambda x: x.exp(), X)
    fewer = Pattern(lambda x: (y := x.neg(), y.exp()), lambda x: x.exp(), x=tensor())
    with pytest.raises(PatternError, match="returns 1 values, the pattern 2"):
        matches(fewer, lambda x: x.neg().exp(), X)


def test_arguments_of_the_wrong_kind() -> None:
    for dims in ("a ... b", "... * d", "n-d", "2"):
        with pytest.raises(PatternError, match="has the dimensions"):
            tensor(dims)
    with pytest.raises(PatternError, match="has the dtypes 'float32'"):
        tensor("... d", "float32")  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="has x='... d', which is no wildcard"):
        Pattern(torch_neg, torch_neg, x="... d")  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="replacement of the pattern torch_neg has the parameters y, .* has no y"):
        Pattern(torch_neg, lambda y: y, x=tensor())
    with pytest.raises(PatternError, match="has guards=.*Give a tuple"):
        Pattern(torch_neg, torch_neg, guards=torch_neg, x=tensor())  # type: ignore[arg-type]
    yes = Pattern(torch_neg, torch_neg, guards=(lambda match: True,), x=tensor())  # type: ignore[arg-type,return-value]
    with pytest.raises(PatternError, match="guard <lambda> of the pattern torch_neg returned True. Return None"):
        matches(yes, lambda x: x.neg() + 1, X)
    lost = Pattern(torch_neg, torch_neg, guards=(lambda match: match["y"],), x=tensor())
    with pytest.raises(PatternError, match="guard <lambda> of the pattern torch_neg raised KeyError: 'y'. .*names x"):
        matches(lost, lambda x: x.neg() + 1, X)


def test_a_graph_of_dynamo_is_none_to_look_in() -> None:
    pattern = Pattern(torch_neg, torch_neg, x=tensor())
    with pytest.raises(PatternError, match="torch_neg is looked for in .* Dynamo .* 'functional' or 'inplace'"):
        run_pass(lambda graph, ctx: pattern.rewrite(graph, ctx), capture(torch_neg, X, stage="dynamo"))


def test_a_pattern_that_cannot_be_traced_says_so() -> None:
    pattern = Pattern(lambda x, y: x @ y, as_hypot_of, x=tensor("a b"), y=tensor("c d"))
    with pytest.raises(PatternError, match=r"cannot be traced on x\[6, 10\], y\[14, 18\]: RuntimeError"):
        matches(pattern, lambda x, y: x @ y, X, Y.t())
