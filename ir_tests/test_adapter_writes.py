"""Cache writes in every spelling: one ``kv_write`` per pair, and caches equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from adapter_harness import Adapted, problem, run
from torch import Tensor

PAGED = torch.ops.tcport.paged_attention.default
KV_WRITE = torch.ops.tcport.kv_write.default
Write = Callable[[Tensor, Tensor, Tensor], None]
"""Stores new ``[T, H, D]`` into a cache ``[N, P, H, D]`` at slots ``[T]``."""


def setitem_page_and_offset(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache[slots // cache.shape[1], slots % cache.shape[1]] = new


def setitem_with_slices(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    page = cache.shape[1]
    cache[torch.div(slots, page, rounding_mode="floor"), torch.remainder(slots, page), :, :] = new


def setitem_on_a_flat_view(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots] = new


def setitem_on_rows(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache.flatten(0, 1).flatten(1)[slots] = new.flatten(1)


def index_put(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache.index_put_((slots // 8, slots % 8), new)


def index_put_function(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    torch.index_put_(cache.flatten(0, 1), [slots], new)


def index_copy(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)


def scatter(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache.flatten(0, 1).scatter_(0, slots[:, None, None].expand_as(new), new)


def head_first(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache.permute(2, 0, 1, 3)[:, slots // 8, slots % 8] = new.transpose(0, 1)


def by_head(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    heads = torch.arange(cache.shape[2])
    cache[(slots // 8)[:, None], (slots % 8)[:, None], heads] = new


def bits(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    cache[slots >> 3, slots & 7] = new.contiguous()


WRITES: list[Write] = [
    setitem_page_and_offset,
    setitem_with_slices,
    setitem_on_a_flat_view,
    setitem_on_rows,
    index_put,
    index_put_function,
    index_copy,
    scatter,
    head_first,
    by_head,
    bits,
]


def write_both(write: Write) -> Callable[..., None]:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        write(k_cache, slots, k)
        write(v_cache, slots, v)

    return model


def write_args(tokens: int = 7) -> tuple[Tensor, ...]:
    given = problem(batch=tokens)
    slots = torch.randperm(given.k_cache.shape[0] * 8, generator=torch.Generator().manual_seed(2))[:tokens]
    return given.k_cache, given.v_cache, slots, given.k[:, 0], given.v[:, 0]


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
def test_write(write: Write) -> None:
    adapted = run(write_both(write), *write_args())
    assert adapted.kinds == ["kv_write:writes"], adapted.report
    assert not adapted.rules


@pytest.mark.parametrize("write", [setitem_page_and_offset, index_copy, setitem_on_rows], ids=lambda w: w.__name__)
def test_write_with_symbolic_sizes(write: Write) -> None:
    adapted = run(write_both(write), *write_args(), dynamic=True)
    assert adapted.kinds == ["kv_write:writes"], adapted.report


def test_slots_are_passed_on_as_they_are() -> None:
    (node,) = run(write_both(setitem_page_and_offset), *write_args()).calls(KV_WRITE)
    assert node.args[4].op == "placeholder"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("new_dtype", [torch.float32, torch.float64])
def test_stored_in_the_dtype_of_the_cache(dtype: torch.dtype, new_dtype: torch.dtype) -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache.flatten(0, 1)[11:18] = k
        v_cache.flatten(0, 1)[11:18] = v

    k_cache, v_cache, slots, k, v = write_args()
    adapted = run(model, k_cache.to(dtype), v_cache.to(dtype), slots, k.to(new_dtype), v.to(new_dtype))
    assert adapted.kinds == ["kv_write:writes"]


def test_rounded_twice_stays_rounded_twice() -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache[slots // 8, slots % 8] = k.bfloat16().float()
        v_cache[slots // 8, slots % 8] = v.bfloat16().float()

    assert run(model, *write_args()).kinds == ["kv_write:writes"]


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_cache(kv_dtype: torch.dtype) -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache[slots // 8, slots % 8] = (k * 30).to(kv_dtype)
        v_cache[slots // 8, slots % 8] = (v * 30).to(kv_dtype)

    k_cache, v_cache, *rest = write_args()
    adapted = run(model, k_cache.to(kv_dtype), v_cache.to(kv_dtype), *rest)
    assert adapted.kinds == ["kv_write:writes"], adapted.report


def test_slice_of_a_flat_cache() -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache.flatten(0, 1)[11:18] = k
        v_cache.flatten(0, 1)[11:18].copy_(v)

    assert run(model, *write_args()).kinds == ["kv_write:writes"]


def test_tokens_of_a_batch() -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        page, offset = slots // 8, slots % 8  # [B, S]
        k_cache[page, offset] = k
        v_cache[page, offset] = v

    given = problem(tokens=3)
    assert run(model, given.k_cache, given.v_cache, given.slots, given.k, given.v).kinds == ["kv_write:writes"]


def test_page_from_the_table() -> None:
    def model(k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k: Tensor, v: Tensor) -> None:
        position = lens - 1
        page = table.gather(1, (position // 8)[:, None]).squeeze(1).long()
        k_cache[page, position % 8] = k
        v_cache[page, position % 8] = v

    given = problem()
    adapted = run(model, given.k_cache, given.v_cache, given.table, given.lens, given.k[:, 0], given.v[:, 0])
    assert adapted.kinds == ["kv_write:writes"], adapted.report


def test_head_major_pool_of_layers() -> None:
    def model(pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for layer in range(2):
            pool[layer, 0, slots // 8, :, slots % 8] = k + layer
            pool[layer, 1, slots // 8, :, slots % 8] = v + layer

    k_cache, _, slots, k, v = write_args()
    pool = torch.randn(2, 2, k_cache.shape[0], 2, 8, 16, generator=torch.Generator().manual_seed(5))
    adapted = run(model, pool, slots, k, v)
    assert adapted.kinds == ["kv_write:writes"] * 2, adapted.report


def test_padding_slots_write_nothing() -> None:
    """The one accepted difference: PyTorch wraps a negative slot around; the last slot of the cache is lost."""
    graphs: list[Adapted] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        from tcport.adapter import adapt

        graphs.append(Adapted(adapt(gm), gm))
        return gm.forward

    torch._dynamo.reset()
    k_cache, v_cache, _, k, v = write_args(tokens=5)
    slots = torch.tensor([0, 17, -1, -1, 63])
    expected = k_cache.clone(), v_cache.clone()
    for cache, new in zip(expected, (k, v), strict=True):
        cache.flatten(0, 1)[slots[slots >= 0]] = new[slots >= 0]
    with torch.no_grad():
        torch.compile(write_both(setitem_on_a_flat_view), backend=backend)(k_cache, v_cache, slots, k, v)
    assert graphs[0].kinds == ["kv_write:writes"]
    assert k_cache.equal(expected[0])
    assert v_cache.equal(expected[1])


def test_part_of_the_head_dim() -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache[slots // 8, slots % 8, :, 4:12] = k[..., :8]
        v_cache[slots // 8, slots % 8, :, 4:12] = v[..., :8]

    assert run(model, *write_args()).kinds == ["kv_write:writes"]


def test_one_number_everywhere_is_no_write() -> None:
    def model(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_cache[slots // 8] = 0.0
        v_cache.zero_()

    assert run(model, *write_args()).report.records == ()


# Writes and attention together.


def decode_step(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    k_cache.view(-1, 2, 16)[slots] = k
    v_cache.view(-1, 2, 16)[slots] = v
    key, value = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
    mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


def alternating_step(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    def update(cache: Tensor, new: Tensor) -> Tensor:
        cache[slots // 8, slots % 8] = new
        return cache[table].flatten(1, 2).transpose(1, 2)

    key, value = update(k_cache, k), update(v_cache, v)
    mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


def value_first_step(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    v_cache[slots // 8, slots % 8] = v
    k_cache[slots // 8, slots % 8] = k
    key, value = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
    mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


def in_place_result_step(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    k_cache = k_cache.index_put_((slots // 8, slots % 8), k)
    v_cache = v_cache.index_put_((slots // 8, slots % 8), v)
    key, value = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
    mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("step", [decode_step, alternating_step, value_first_step, in_place_result_step])
def test_step(step: Callable[..., Tensor], dynamic: bool) -> None:
    given = problem()
    args = (*given.args, given.slots[:, 0], given.k[:, 0], given.v[:, 0])
    adapted = run(step, *args, dynamic=dynamic)
    assert adapted.kinds == ["kv_write:writes", "paged_attention:sdpa"], adapted.report
    (write,), (attention,) = adapted.calls(KV_WRITE), adapted.calls(PAGED)
    assert write.args[2:4] == attention.args[1:3], "both see K as K and V as V"


def test_halves_of_one_pool_as_separate_inputs() -> None:
    given = problem()
    pool = torch.stack([given.k_cache, given.v_cache])
    adapted = run(
        alternating_step,
        given.q,
        pool[0],
        pool[1],
        given.table,
        given.lens,
        given.slots[:, 0],
        given.k[:, 0],
        given.v[:, 0],
    )
    assert adapted.kinds == ["kv_write:writes", "paged_attention:sdpa"], adapted.report


def test_interleaved_halves_as_separate_inputs() -> None:
    given = problem()
    both = torch.stack([given.k_cache, given.v_cache], 1)
    adapted = run(
        alternating_step,
        *(given.q, both[:, 0], both[:, 1], given.table, given.lens),
        *(given.slots[:, 0], given.k[:, 0], given.v[:, 0]),
    )
    assert adapted.kinds == ["kv_write:writes", "paged_attention:sdpa"], adapted.report


def test_layers_in_one_pool() -> None:
    def model(q: Tensor, pool: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for layer in range(2):
            k_cache, v_cache = pool[layer]
            q = alternating_step(q, k_cache, v_cache, table, lens, slots, k * (layer + 1), v)
        return q

    given = problem()
    pool = torch.randn(2, 2, *given.k_cache.shape, generator=torch.Generator().manual_seed(5))
    adapted = run(model, given.q, pool, given.table, given.lens, given.slots[:, 0], given.k[:, 0], given.v[:, 0])
    assert adapted.kinds == ["kv_write:writes", "paged_attention:sdpa"] * 2, adapted.report


def test_prefill_step() -> None:
    def model(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        positions = (lens - tokens)[:, None] + torch.arange(tokens)
        page = table.gather(1, positions // 8).long()
        k_cache[page, positions % 8] = k
        v_cache[page, positions % 8] = v
        key, value = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
        mask = (torch.arange(key.shape[2]) <= positions[..., None])[:, None]
        return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True)

    given = problem(tokens=5)
    adapted = run(model, *given.args, given.k, given.v)
    assert adapted.kinds == ["kv_write:writes", "paged_attention:sdpa"], adapted.report
    assert not adapted.rules


def test_functional_update_is_a_cache_of_its_own() -> None:
    def model(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        k_cache = k_cache.index_put((slots // 8, slots % 8), k)
        v_cache = v_cache.index_put((slots // 8, slots % 8), v)
        key, value = (c[table].flatten(1, 2).transpose(1, 2) for c in (k_cache, v_cache))
        mask = (torch.arange(key.shape[2]) < lens[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q, key, value, mask, enable_gqa=True), k_cache, v_cache

    given = problem()
    adapted = run(model, *given.args, given.slots[:, 0], given.k[:, 0], given.v[:, 0])
    assert adapted.kinds == ["paged_attention:sdpa"], adapted.report
