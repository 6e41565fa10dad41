"""A fusion in one function, and its test: ``python examples/write_a_graph_pass.py``.

``x * sigmoid(x)``, which models write by hand, becomes one ``aten.silu`` node.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tcport
from tcport.testing import assert_equivalent, assert_graph, capture, run_pass

aten = torch.ops.aten


@tcport.register_pass(name="fuse_silu", before=("fuse_silu_mul",))
def fuse_silu(graph: torch.fx.Graph, ctx: tcport.PassContext) -> int:
    """Rules: a product of a tensor and its own sigmoid; where the sigmoid has other users, it stays for them."""
    matches = 0
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        for x, gate in (product.args, reversed(product.args)):
            if isinstance(gate, torch.fx.Node) and gate.target is aten.sigmoid.default and gate.args[0] is x:
                with graph.inserting_before(product):
                    silu = graph.call_function(aten.silu.default, (x,))
                product.replace_all_uses_with(silu)
                graph.erase_node(product)
                if not gate.users:
                    graph.erase_node(gate)
                matches += 1
                break
    return matches


def gated(x: Tensor, y: Tensor) -> Tensor:
    return (x * torch.sigmoid(x)) * y


def test_the_pass() -> None:
    graph = capture(gated, torch.randn(4, 8), torch.randn(4, 8))
    run_pass("fuse_silu", graph, matches=1)
    assert_graph(graph, "CHECK: aten.silu.default\nCHECK-NOT: aten.sigmoid\nCHECK-NOT: aten.exp")
    assert_equivalent(gated, torch.randn(4, 8), torch.randn(4, 8), matches={"fuse_silu": 1})


if __name__ == "__main__":
    test_the_pass()
    print(tcport.explain(gated, torch.randn(4, 8), torch.randn(4, 8)))
