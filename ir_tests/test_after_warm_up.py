"""Case A20: after a warm-up, no batch size, length, table width or offset of a live request compiles anything."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_chain_compiled import expected, serve
from torch import Tensor

import tcport
from tcport._inductor import compile_count
from tcport.device import catalogue_profile
from tcport.kernels.call import AttentionCall
from tcport.kernels.offline import record, specialise
from tcport.lowering.registry import select
from tcport.lowering.spec import attention_spec

BATCHES, LENGTHS, PAGE = (1, 2, 3, 7, 15, 16, 17, 33, 64), (1, 15, 16, 17, 1000, 4096), 4
WARM_UP = ((3, 4, 0), (5, 6, 1), (1, 4, 0), (1, 6, 1), (3, 1, 0), (5, 1, 1), (1, 1, 0))
"""Batch, table width and offset: to torch.compile a size of 1 is code of its own, and two others make it share one."""


def shifted(tensor: Tensor, shift: int) -> Tensor:
    """The same numbers ``shift`` elements into their storage: no address of theirs is aligned."""
    return torch.cat([tensor.new_zeros(shift), tensor.flatten()])[shift:].view(tensor.shape)


def request(size: int, width: int, length: int, shift: int) -> list[Tensor]:
    """A decode step whose table and lengths lie ``shift`` elements into their storage."""
    table = torch.randint(size, (size, width)).int()
    table[:, (length - 1) // PAGE] = torch.arange(size)
    lens = torch.full((size,), length)
    caches = (torch.randn(64, PAGE, 2, 16) for _ in range(2))
    return [
        *(torch.randn(size, heads, 16) for heads in (4, 2, 2)),
        *caches,
        shifted(table, shift),
        shifted(lens, shift),
    ]


def check(compiled: object, args: list[Tensor]) -> None:
    want = expected(args)
    torch.testing.assert_close(compiled(*args), want, rtol=1e-4, atol=1e-4)  # type: ignore[operator]  # 4096 keys


def test_no_request_compiles_a_graph() -> None:
    compiled = torch.compile(serve, backend="tcport", fullgraph=True)
    for size, width, shift in WARM_UP:
        check(compiled, request(size, width, 1, shift))
    graphs, seen = compile_count(), len(tcport.history.fallbacks())
    for size, length in itertools.product(BATCHES, LENGTHS):
        pages = -(-length // PAGE)
        for width, shift in ((pages, 0), (pages + 1, 1)):
            check(compiled, request(size, width, length, shift))
    assert compile_count() == graphs
    assert len(tcport.history.fallbacks()) == seen


def binaries(size: int, width: int, aligned: bool) -> dict[str, set[str]]:
    """What Triton's cache would tell apart among the launches of a request, by the tile."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = [empty(65536, 16, 8, 128) for _ in range(2)]
    tables = empty(size, width, dtype=torch.int32), empty(size, dtype=torch.int32)
    call = AttentionCall.of(empty(size, 32, 128), *caches, *tables)
    chosen = select("paged_attention", attention_spec(call), catalogue_profile("h200")).candidates[0]
    keys = set()
    for launch in record(lambda call, launch: chosen.run(call, launch), call):
        known = specialise(launch, aligned=True)
        kept = known.aligned if aligned else [name for name in known.aligned if name not in ("block_table", "seq_lens")]
        keys.add(f"{launch.kernel.__name__} {known.signature} {known.constants} {kept} {launch.options}")
    tile = chosen.config
    return {f"{tile.block_m}x{tile.block_n} w{tile.num_warps} st{tile.num_stages} {tile.num_splits > 1}": keys}  # type: ignore[union-attr]


@pytest.mark.parametrize("aligned", [True, False])
def test_a_binary_is_for_any_batch_and_length(aligned: bool) -> None:
    """Of each tile, split or whole, there is one binary of the attention kernel and one of what merges splits."""
    found: dict[str, set[str]] = {}
    for size, length in itertools.product(BATCHES, LENGTHS):
        for tile, keys in binaries(size, -(-length // 16) + 1, aligned).items():
            found.setdefault(tile, set()).update(keys)
    kernels = {tile: sorted(key.split()[0] for key in keys) for tile, keys in found.items()}
    assert len(kernels) > 1
    for tile, names in kernels.items():
        attention = ["paged_attention_kernel"]
        assert names == (["combine_kernel", *attention] if tile.endswith("True") else attention), tile
