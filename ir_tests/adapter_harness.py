"""Compiles a function with the adapter as its backend, and checks the rewritten graph against the function itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tcport.adapter import AdapterReport, adapt

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclasses.dataclass
class Adapted:
    """What came of adapting one function.

    Attributes:
        report: of the graph; there is exactly one.
        graph: the rewritten graph.
        result: of the first run of the rewritten graph.
        kinds: the matches, by kind and matcher, in graph order. rules: those of the rejections.
    """

    report: AdapterReport
    graph: GraphModule
    result: Any = None

    @property
    def kinds(self) -> list[str]:
        return [f"{match.kind}:{match.matcher}" for match in self.report.matches]

    @property
    def rules(self) -> list[str]:
        return [rejection.rule for rejection in self.report.rejections]

    def calls(self, target: Any) -> list[torch.fx.Node]:
        return [node for node in self.graph.graph.nodes if node.target == target]


def run(function: Callable[..., Any], *args: Any, dynamic: bool | None = False, compare: bool = True) -> Adapted:
    """Run ``function`` eagerly and through the adapter, on copies of ``args``; compare results and every argument.

    Results agree to the rounding of their dtype; arguments, caches among them, agree to the last bit.

    Args:
        function: what to compile; args: its arguments.
        dynamic: as ``torch.compile`` takes it.
        compare: False for a function whose result is random.
    """
    expected_args, actual_args = _copies(args), _copies(args)
    with torch.no_grad():
        expected = function(*expected_args)
        adapted = _compile(function, actual_args, dynamic)
    if compare:
        _check(adapted.result, expected)
    for got, want in zip(_tensors(actual_args), _tensors(expected_args), strict=True):
        assert got.flatten().view(torch.uint8).equal(want.flatten().view(torch.uint8)), "an argument differs"
    return adapted


def adapt_only(function: Callable[..., Any], *args: Any) -> Adapted:
    """Adapt ``function`` in the current grad mode, without a comparison."""
    return _compile(function, args, False)


def _compile(function: Callable[..., Any], args: Any, dynamic: bool | None) -> Adapted:
    found: list[Adapted] = []

    def backend(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(Adapted(adapt(gm), gm))
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    assert len(found) == 1, f"{len(found)} graphs"
    found[0].result = result
    return found[0]


def _check(actual: Any, expected: Any) -> None:
    for got, want in zip(_tensors(actual), _tensors(expected), strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        if want.dtype.is_floating_point:
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[want.dtype], equal_nan=True)
        else:
            assert got.equal(want)


def _copies(args: Any) -> Any:
    """Copies that share memory where the originals do."""
    bases: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in bases:
                flat = torch.empty(0, dtype=value.dtype).set_(storage.clone())
                bases[storage.data_ptr()] = flat
            base = bases[storage.data_ptr()]
            return torch.as_strided(base.view(value.dtype), value.shape, value.stride(), value.storage_offset())
        if isinstance(value, tuple | list):
            return type(value)(copy(item) for item in value)
        return value

    return copy(tuple(args))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.contiguous()]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@dataclasses.dataclass(frozen=True)
class Problem:
    """A ragged paged batch, in the plain tensors a model works with.

    Attributes:
        q: ``[B, Hq, S, D]``. k_cache, v_cache: ``[N, P, Hkv, D]``. table: ``[B, M]`` int32, shuffled pages.
        lens: ``[B]`` int64, keys of each sequence, the S query tokens' own included.
        k, v: ``[B, S, Hkv, D]``, new keys and values.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lens: Tensor
    k: Tensor
    v: Tensor

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.table, self.lens

    @property
    def slots(self) -> Tensor:
        """``[B, S]`` slots of the new tokens."""
        page = self.k_cache.shape[1]
        steps = torch.arange(self.k.shape[1]) - self.k.shape[1]
        positions = self.lens[:, None] + steps
        return self.table.long().gather(1, positions // page) * page + positions % page


def problem(
    batch: int = 3,
    heads: tuple[int, int] = (6, 2),
    tokens: int = 1,
    pages: int = 5,
    page: int = 8,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Problem:
    """A problem with random lengths from ``tokens`` up to all the table holds; unused pages hold noise."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    q_heads, kv_heads = heads
    number = batch * pages + 3
    return Problem(
        q=normal(batch, q_heads, tokens, dim),
        k_cache=normal(number, page, kv_heads, dim),
        v_cache=normal(number, page, kv_heads, dim),
        table=torch.randperm(number, generator=random)[: batch * pages].reshape(batch, pages).int(),
        lens=torch.randint(tokens, pages * page + 1, (batch,), generator=random),
        k=normal(batch, tokens, kv_heads, dim),
        v=normal(batch, tokens, kv_heads, dim),
    )
