"""A fusion in one function, and its test: ``python examples/write_a_graph_pass.py``.

``log(1 + x)``, which models write by hand, becomes one ``aten.log1p`` node, which is also more accurate for small x.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tcport
from tcport.testing import assert_equivalent, assert_graph, capture, run_pass

aten = torch.ops.aten


@tcport.register_pass(name="fuse_log1p", before=("select_tiles",))
def fuse_log1p(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
    """Rules: the logarithm of a tensor plus the number 1; where the sum has other users, it stays for them."""
    matches = 0
    for log in graph.find_nodes(op="call_function", target=aten.log.default):
        total = log.args[0]
        if not isinstance(total, torch.fx.Node) or total.target is not aten.add.Tensor:
            continue
        if total.args[1] != 1 or total.kwargs:
            continue
        with graph.inserting_before(log):
            log1p = graph.call_function(aten.log1p.default, (total.args[0],))
        log.replace_all_uses_with(log1p)
        graph.erase_node(log)
        if not total.users:
            graph.erase_node(total)
        matches += 1
    return matches


def softplus(x: Tensor, y: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x)) * y


def test_the_pass() -> None:
    graph = capture(softplus, torch.randn(4, 8), torch.randn(4, 8))
    run_pass("fuse_log1p", graph, matches=1)
    assert_graph(graph, "CHECK: aten.exp.default\nCHECK: aten.log1p.default\nCHECK-NOT: aten.log.default")
    assert_equivalent(softplus, torch.randn(4, 8), torch.randn(4, 8), matches={"fuse_log1p": 1})


if __name__ == "__main__":
    test_the_pass()
    print(tcport.explain(softplus, torch.randn(4, 8), torch.randn(4, 8)))
