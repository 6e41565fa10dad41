"""Calls that Dynamo captured although their arguments are wrong.

Dynamo turns an exception raised while it runs an operator's fake into one of its own. The fakes therefore stay quiet
under Dynamo, and the backend looks at every captured call again here, where the error can reach the user as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tcport import _inductor, checks, operator_library  # noqa: F401  (it defines the operators)
from tcport.argument_types import refuse_type
from tcport.errors import TcportError


def first_invalid_call(gm: torch.fx.GraphModule) -> TcportError | None:
    """The error of the first tcport call in a Dynamo graph whose arguments are wrong; None if all are right.

    The fakes ran under the autocast state of the traced code, which decides what is right; the graph is looked at only
    where one of them objected, and only for the message: there the sizes are numbers.
    """
    objections, _objections.errors = _objections.errors, []
    if not objections:
        return None
    for node in gm.graph.nodes:
        check = _CHECKS.get(getattr(node.target, "overloadpacket", node.target))
        if node.op == "call_function" and check is not None:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), _concrete_value)
            try:
                check(*args, **kwargs)
            except TcportError as error:
                return error
    return None


def _concrete_value(node: torch.fx.Node) -> Any:
    return _inductor.concrete(node.meta["example_value"])


def postpone(error: TcportError) -> bool:
    """Keep an objection of a fake for :func:`first_invalid_call` while Dynamo is tracing; False when it is not."""
    tracing = _inductor.in_dynamo()
    if tracing:
        _objections.errors.append(error)
    return tracing


class _Objections(threading.local):
    errors: list[TcportError]

    def __init__(self) -> None:
        self.errors = []


_objections = _Objections()

_CHECKS: dict[Any, Callable[..., Any]] = {
    torch.ops.tcport.paged_attention: checks.check_paged_attention,
    torch.ops.tcport.kv_write: checks.check_kv_write,
    torch.ops.tcport.merge_states: checks.check_merge_states,
    torch.ops.tcport.check_out: checks.check_out,
    torch.ops.tcport.check_shared_pages: checks.check_shared_pages,
    torch.ops.tcport.refuse_type: refuse_type,
}
