"""What Python code refuses beside the operators is refused by compiled code in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_checks import BAD, Q_HEADS, TOKENS, V_DIM, Arguments, attention, caches

import tcport
from tcport.errors import DtypeError, TcportError

COMPILED = [
    case
    for case in BAD
    if case[0] is tcport.shared_prefix_attention or "out" in case[1] or "share memory" in case[3] or "ratio" in case[3]
]


@pytest.mark.parametrize(("operator", "arguments", "error", "message"), COMPILED)
def test_compiled_code_refuses_alike(
    operator: Callable[..., Any], arguments: Arguments, error: type[TcportError], message: str
) -> None:
    """What Python code refuses beside the operators; for these, see ``test_backend.py``."""
    with pytest.raises(error) as real:
        operator(**arguments)
    compiled = torch.compile(operator, backend="tcport", fullgraph=True)
    with pytest.raises(error) as refused:
        compiled(**arguments)
    assert str(refused.value) == str(real.value)


def test_out_has_the_dtype_that_autocast_gives_the_result() -> None:
    arguments = attention(**caches(torch.bfloat16))
    right = torch.empty(TOKENS, Q_HEADS, V_DIM, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert tcport.paged_attention(**arguments, out=right) is right
        with pytest.raises(DtypeError, match="out has dtype torch.float32; allowed: torch.bfloat16"):
            tcport.paged_attention(**arguments, out=right.float())
