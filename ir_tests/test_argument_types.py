"""Arguments of a Python type that has no meaning there: eager, fake and compiled code refuse them in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from test_checks import Arguments, attention, fake_arguments, merge, write
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tcport
from tcport import argument_types
from tcport.argument_types import wrong_type
from tcport.errors import ArgumentError, ShapeError
from tcport.testing import count_compiles

TO_TENSOR = "Make it a tensor on the device of the others, with torch.tensor(...)."
TO_NUMBER = "Pass a Python number; a tensor's is .item(), read outside compiled code."
FIXED = "Pass one of the two; it is fixed when code is compiled."
OPTIONAL = "a tensor, or None to leave it out"


def shared(**changes: Any) -> Arguments:
    return {"shared_pages": 1, **attention(), **changes}


WRONG: list[tuple[Callable[..., Any], Arguments, str]] = [
    (tcport.paged_attention, attention(query=None), f"query is of type NoneType; allowed: a tensor. {TO_TENSOR}"),
    (tcport.paged_attention, attention(k_cache=(1, 2)), f"k_cache is of type tuple; allowed: a tensor. {TO_TENSOR}"),
    (
        tcport.paged_attention,
        attention(block_table=[[0, 1], [2, 3]]),
        f"block_table is of type list; allowed: a tensor. {TO_TENSOR}",
    ),
    (tcport.paged_attention, attention(seq_lens=3), f"seq_lens is of type int; allowed: a tensor. {TO_TENSOR}"),
    (
        tcport.paged_attention,
        attention(cu_seqlens_q=[0, 2, 7]),
        f"cu_seqlens_q is of type list; allowed: {OPTIONAL}. {TO_TENSOR}",
    ),
    (tcport.paged_attention, attention(mask=True), f"mask is of type bool; allowed: {OPTIONAL}. {TO_TENSOR}"),
    (tcport.paged_attention, attention(sinks=[0.5]), f"sinks is of type list; allowed: {OPTIONAL}. {TO_TENSOR}"),
    (
        tcport.paged_attention,
        attention(alibi_slopes=0.5),
        f"alibi_slopes is of type float; allowed: {OPTIONAL}. {TO_TENSOR}",
    ),
    (tcport.paged_attention, attention(out=1.0), f"out is of type float; allowed: {OPTIONAL}. {TO_TENSOR}"),
    (
        tcport.paged_attention,
        attention(k_scale="x"),
        f"k_scale is of type str; allowed: a tensor, a number, or None to leave it out. {TO_TENSOR}",
    ),
    (
        tcport.paged_attention,
        attention(window=3.5),
        f"window is of type float; allowed: an integer, or None to leave it out. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(window=torch.tensor(3)),
        f"window is a tensor; allowed: an integer, or None to leave it out. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(num_splits=True),
        f"num_splits is of type bool; allowed: an integer, or None to leave it out. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(chunk="4"),
        f"chunk is of type str; allowed: an integer, or None to leave it out. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(scale="x"),
        f"scale is of type str; allowed: a number, or None for the default. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(scale=1j),
        f"scale is of type complex; allowed: a number, or None for the default. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(softcap=None),
        f"softcap is of type NoneType; allowed: a number, 0.0 for none. {TO_NUMBER}",
    ),
    (
        tcport.paged_attention,
        attention(causal=None),
        f"causal is of type NoneType; allowed: True or False. {FIXED}",
    ),
    (
        tcport.paged_attention,
        attention(causal=torch.tensor(True)),
        f"causal is a tensor; allowed: True or False. {FIXED}",
    ),
    (
        tcport.paged_attention,
        attention(return_lse=1),
        f"return_lse is of type int; allowed: True or False. {FIXED}",
    ),
    (
        tcport.paged_attention,
        attention(batch_invariant="no"),
        f"batch_invariant is of type str; allowed: True or False. {FIXED}",
    ),
    (tcport.kv_write, write(key=[1.0]), f"key is of type list; allowed: a tensor. {TO_TENSOR}"),
    (tcport.kv_write, write(slot_mapping=[1, 2]), f"slot_mapping is of type list; allowed: a tensor. {TO_TENSOR}"),
    (
        tcport.kv_write,
        write(v_scale=[1.0]),
        f"v_scale is of type list; allowed: a tensor, a number, or None to leave it out. {TO_TENSOR}",
    ),
    (tcport.merge_states, merge(lse_a=None), f"lse_a is of type NoneType; allowed: a tensor. {TO_TENSOR}"),
    (tcport.merge_states, merge(out_b=1.0), f"out_b is of type float; allowed: a tensor. {TO_TENSOR}"),
    (
        tcport.shared_prefix_attention,
        shared(shared_pages=1.5),
        f"shared_pages is of type float; allowed: an integer. {TO_NUMBER}",
    ),
    (
        tcport.shared_prefix_attention,
        shared(block_table=[[1]]),
        f"block_table is of type list; allowed: a tensor. {TO_TENSOR}",
    ),
    (
        tcport.shared_prefix_attention,
        shared(softcap="x"),
        f"softcap is of type str; allowed: a number, 0.0 for none. {TO_NUMBER}",
    ),
]
IDS = [f"{operator.__name__}: {message.split(';')[0]}" for operator, _, message in WRONG]


@pytest.mark.parametrize(("operator", "arguments", "message"), WRONG, ids=IDS)
def test_refused_everywhere_in_the_same_words(operator: Callable[..., Any], arguments: Arguments, message: str) -> None:
    with pytest.raises(ArgumentError) as eager:
        operator(**arguments)
    with FakeTensorMode() as mode, pytest.raises(ArgumentError) as fake:
        operator(**fake_arguments(arguments, mode, dynamic=False))
    with pytest.raises(ArgumentError) as compiled:
        torch.compile(operator, backend="tcport", fullgraph=True)(**arguments)
    assert [str(refused.value) for refused in (eager, fake, compiled)] == [message] * 3


def test_compiled_code_that_uses_the_result_is_refused_too() -> None:
    wrong: Arguments = {"window": 2.0}

    def model(query: Tensor, **arguments: Any) -> Tensor:
        out, lse = tcport.paged_attention(query * 2, **arguments, **wrong, return_lse=True)
        return out.transpose(0, 1).reshape(6, -1) + lse.sum()

    with pytest.raises(ArgumentError, match="window is of type float"):
        torch.compile(model, backend="tcport", fullgraph=True)(**attention())


@pytest.mark.parametrize(
    ("given", "plain"),
    [({"scale": 1, "softcap": 2}, {"scale": 1.0, "softcap": 2.0}), ({"k_scale": 2}, {"k_scale": 2.0})],
    ids=str,
)
def test_an_integer_is_a_number(given: Arguments, plain: Arguments) -> None:
    arguments = attention()
    expected = tcport.paged_attention(**{**arguments, **plain})
    torch.testing.assert_close(tcport.paged_attention(**{**arguments, **given}), expected, rtol=0, atol=0)
    compiled = torch.compile(tcport.paged_attention, backend="tcport", fullgraph=True)
    torch.testing.assert_close(compiled(**{**arguments, **given}), expected)


def test_numbers_of_numpy_are_numbers_outside_compiled_code() -> None:
    arguments = attention()
    expected = tcport.paged_attention(**arguments, window=3, scale=0.5)
    of_numpy: Arguments = {"window": numpy.int64(3), "scale": numpy.float32(0.5)}
    torch.testing.assert_close(tcport.paged_attention(**arguments, **of_numpy), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["query", "k_cache", "v_cache", "block_table"])
def test_sparse_tensors_are_refused(name: str) -> None:
    arguments = attention()
    arguments[name] = arguments[name].to_sparse()
    with pytest.raises(ShapeError) as refused:
        tcport.paged_attention(**arguments)
    assert str(refused.value) == (
        f"{name} has layout torch.sparse_coo; allowed: torch.strided. Pass {name}.to_dense()."
    )


class _SaysItIsATensor:
    """Of another class than its type: right by what it says, which another object of the type need not say."""

    def __init__(self, says: bool) -> None:
        self.says = says

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return Tensor if self.says else _SaysItIsATensor


def test_types_that_were_right_are_not_looked_at_again_and_those_of_single_objects_are() -> None:
    cause = "sinks is of type _SaysItIsATensor; allowed: a tensor, or None to leave it out."
    for says in (True, False, True):
        wrong = wrong_type(sinks=_SaysItIsATensor(says))
        assert wrong is None if says else wrong == (cause, TO_TENSOR)
    for window, right in ((3, True), (True, False), (3, True), (3.0, False), (None, True), (numpy.int64(3), True)):
        assert (wrong_type(window=window) is None) is right
        assert (wrong_type(window=window, sinks=None) is None) is right
        assert wrong_type(sinks=None, causal=True) is None
        assert wrong_type(sinks=None, window=True) is not None


def test_compiled_code_does_not_ask_again_what_types_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when the answer would be another one; a type that changes is looked at."""
    arguments = attention()
    query = arguments["query"]

    def run(query: Tensor, window: Any) -> Tensor:
        return tcport.paged_attention(**{**arguments, "query": query}, window=window)

    with count_compiles() as compiles:
        compiled = torch.compile(run, backend="tcport", fullgraph=True, dynamic=False)
        first = compiled(query, 3)
        monkeypatch.setattr(argument_types, "_KINDS", {})
        torch.testing.assert_close(compiled(query, 3), first, rtol=0, atol=0)
        assert compiles == 1
        monkeypatch.undo()
        with pytest.raises(ArgumentError, match="window is of type float"):
            compiled(query, 3.0)
        with pytest.raises(ArgumentError, match="window is of type bool"):
            compiled(query, True)
