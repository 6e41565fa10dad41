"""Whether a graph that was broken off can be run again from the start with the same result.

Rules, for each graph input that the graph changes:
    1. It is changed by one ``tcport::kv_write`` alone. Its slots are then written again with the same values.
    2. Nothing reads it but that write: everything else reads the cache as it is after the write, which is what a second
       run finds too.

Inputs that are only read make no difference. The graph must be functional: each change of an input is one
``aten.copy_`` to its placeholder at the end.
"""

from __future__ import annotations

import torch
import torch.fx

_COPY = torch.ops.aten.copy_.default


def unrepeatable(graph: torch.fx.Graph) -> str | None:
    """The first input or operation that forbids a second run; None when there is none."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _COPY and node.args[0].op == "placeholder":
            if not _written_once(*node.args[:2]):
                shape = ", ".join(str(size) for size in node.args[0].meta["val"].shape)
                return f"the graph input {node.args[0].name} [{shape}]"
        elif getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            return f"what {node.name} changes"
    return None


def _written_once(target: torch.fx.Node, new: torch.fx.Node) -> bool:
    """Whether the new content of an input is its old one with one cache write applied, and no one else sees the old."""
    write = new.args[0] if new.args and isinstance(new.args[0], torch.fx.Node) else None
    if write is None or torch.ops.tcport.kv_write.default not in write.args:
        return False
    return set(target.users) <= {write, *(user for user in target.users if user.target is _COPY)}
