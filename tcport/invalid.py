"""Calls that Dynamo captured although their arguments are wrong.

Dynamo turns an exception raised while it runs an operator's fake into one of its own. The fakes therefore stay quiet
under Dynamo, and the backend looks at every captured call again here, where the error can reach the user as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from tcport import checks, ops  # noqa: F401  (ops defines the operators)
from tcport.errors import TcportError


def first_invalid_call(gm: torch.fx.GraphModule) -> TcportError | None:
    """The error of the first tcport call in a Dynamo graph whose arguments are wrong; None if all are right."""
    for node in gm.graph.nodes:
        check = _CHECKS.get(getattr(node.target, "overloadpacket", node.target))
        if node.op == "call_function" and check is not None:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
            try:
                check(*args, **kwargs)
            except TcportError as error:
                return error
    return None


_CHECKS: dict[Any, Callable[..., Any]] = {
    torch.ops.tcport.paged_attention: checks.check_paged_attention,
    torch.ops.tcport.kv_write: checks.check_kv_write,
    torch.ops.tcport.merge_states: checks.check_merge_states,
}
