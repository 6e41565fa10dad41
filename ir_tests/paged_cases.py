"""Small paged attention problems with everything that must not be read made poisonous."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tcport.kernels import reference
from tcport.kernels.call import AttentionCall, MergeCall, WriteCall

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_NOWHERE = 2**30  # a page id that lies far outside every cache


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        lens: keys of each sequence. q_lens: query tokens of each; None: the decode form, one each.
        heads: query and KV heads. dims: Dqk and Dv. page: page size.
        uncovered: query rows before and behind those that ``cu_seqlens_q`` covers.
        layout: "NHD", "HND", "interleaved" (K and V of a page adjacent), "packed" (K and V of a head adjacent) or
            "mla" (V is a view of K).
        scales: "none", "tensor", "head" or "token".
        options: names of options to switch on (see ``_OPTIONS``) with their values.
    """

    lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    uncovered: tuple[int, int] = (0, 0)
    layout: str = "NHD"
    scales: str = "none"
    index_dtype: torch.dtype = torch.int32
    strided_query: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def with_options(self, **options: Any) -> Case:
        return dataclasses.replace(self, options=self.options + tuple(options.items()))


def build(case: Case, device: str = "cpu") -> AttentionCall:
    """The call of a case: random values where there are tokens, NaN (or noise) in every other byte."""
    random = torch.Generator().manual_seed(case.seed)
    q_heads, kv_heads = case.heads
    dim_qk, dim_v = case.dims
    q_lens = (1,) * len(case.lens) if case.q_lens is None else case.q_lens
    tokens = sum(q_lens) + sum(case.uncovered)

    pages_of = [-(-length // case.page) for length in case.lens]
    num_pages = sum(pages_of) + 2
    order = torch.randperm(num_pages, generator=random)
    table = torch.full((len(case.lens), max(pages_of, default=0) + 2), _NOWHERE, dtype=case.index_dtype)
    start = 0
    for b, count in enumerate(pages_of):
        table[b, :count] = order[start : start + count].to(table.dtype)
        start += count

    k_cache, v_cache = _caches(case, num_pages)
    keys = _values(case, (num_pages, case.page, kv_heads, dim_qk), random)
    values = _values(case, (num_pages, case.page, kv_heads, dim_v), random)
    k_scale, v_scale = (_scale(case, num_pages, random) for _ in range(2))
    for b, length in enumerate(case.lens):
        position = torch.arange(length)
        page, slot = table[b, position // case.page].long(), position % case.page
        v_cache[page, slot] = values[page, slot]
        k_cache[page, slot] = keys[page, slot]
        if case.scales == "token":
            k_scale[1][page, slot], v_scale[1][page, slot] = k_scale[0][page, slot], v_scale[0][page, slot]
    k_scale, v_scale = k_scale[1], v_scale[1]

    width = q_heads * dim_qk
    query = torch.randn(tokens, width + 48, generator=random).to(case.dtype)
    query = query[:, 16 : 16 + width] if case.strided_query else query[:, :width].contiguous()
    options = dict(case.options)
    starts = torch.tensor([0, *q_lens]).cumsum(0) + case.uncovered[0]
    made = {
        "alibi_slopes": lambda on: torch.rand(q_heads, generator=random) * 0.3,
        "sinks": lambda on: torch.randn(q_heads, generator=random) * 2,
        "mask": lambda columns: torch.rand(tokens, columns, generator=random) < 0.6,
    }
    for name in set(made) & set(options):
        options[name] = made[name](options[name]).to(device)
    return AttentionCall.of(
        query.view(tokens, q_heads, dim_qk).to(device),
        *_to(device, k_cache, v_cache),
        table.to(device),
        torch.tensor(case.lens, dtype=case.index_dtype).to(device),
        None if case.q_lens is None else starts.to(case.index_dtype).to(device),
        k_scale=None if k_scale is None else k_scale.to(device),
        v_scale=None if v_scale is None else v_scale.to(device),
        **{"return_lse": True, **options},
    )


def expected(call: AttentionCall, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Output and LSE of the reference, computed on the CPU in ``dtype``."""
    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    for name in ("num_splits", "batch_invariant", "return_lse"):
        del fields[name]
    fields = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in fields.items()}
    positional = [fields.pop(n) for n in ("query", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")]
    return reference.paged_attention(*positional, **fields, compute_dtype=dtype)


def check(
    call: AttentionCall, out: Tensor, lse: Tensor, tolerance: float, want: tuple[Tensor, Tensor] | None = None
) -> None:
    """Compare with the reference.

    Args:
        want: what :func:`expected` gave for the call; None: it is asked.
        tolerance: bound on ``|out - ref| / |ref|`` over the whole output. The LSE, which never leaves fp32, is held to
            1e-5 of its size.
    """
    want, want_lse = want or expected(call)
    assert out.shape == want.shape
    assert out.dtype == call.query.dtype
    assert out.is_contiguous()
    out, lse = out.cpu().double(), lse.cpu().double()
    # Rows without a visible key are exactly 0, so a row left unwritten or polluted cannot hide in the norm.
    empty = want.abs().amax(-1) == 0
    assert torch.equal(out[empty], want[empty])
    error = (out - want).norm() / want.norm().clamp_min(1e-30)
    assert error <= tolerance, f"output differs by {error:.2e}"
    if call.return_lse:
        assert torch.equal(lse.isinf(), want_lse.isinf())
        finite = ~want_lse.isinf()
        worst = ((lse - want_lse)[finite].abs() / (1 + want_lse[finite].abs())).max().item() if finite.any() else 0.0
        assert worst <= 1e-5, f"LSE differs by {worst:.2e}"


def write_problem(
    kv_dtype: torch.dtype, scales: str, layout: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[WriteCall, tuple[Tensor, Tensor]]:
    """A cache write with padding, slots beyond the cache and more rows than slots, and the caches it must leave.

    The values hold ties between two stored numbers, subnormals, infinities and NaN where the cache has a form of them.
    """
    random = torch.Generator().manual_seed(3)
    heads, page, pages, dims = 3, 4, 5, (20, 12)
    case = Case((), heads=(heads, heads), dims=dims, page=page, kv_dtype=kv_dtype, layout=layout, scales=scales)
    k_cache, v_cache = _caches(case, pages)
    slots = torch.tensor([0, 17, -1, 2, -1, pages * page - 1, pages * page, 5, -17, 2**31 + 1])
    key, value = (torch.randn(len(slots) + 3, heads, 2 * dim, generator=random)[..., :dim] for dim in dims)
    key = key * torch.logspace(-4, 4, len(slots) + 3)[:, None, None]
    key[0, 0] = torch.arange(dims[0]) / 2 - 4.25
    if kv_dtype != torch.int8:
        key[1, 1, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    k_scale, v_scale = (_scale(case, pages, random)[0] for _ in range(2))
    key, value = key.to(dtype), value.to(dtype)
    want = (k_cache.clone(), v_cache.clone())
    reference.kv_write(key, value, *want, slots, k_scale=k_scale, v_scale=v_scale)
    scales_there = {"k_scale": k_scale, "v_scale": v_scale}
    scales_there = {name: scale if scale is None else scale.to(device) for name, scale in scales_there.items()}
    call = WriteCall.of(
        key.to(device), value.to(device), *_to(device, k_cache, v_cache), slots.to(device), **scales_there
    )
    return call, want


def assert_same_caches(call: WriteCall, want: tuple[Tensor, Tensor]) -> None:
    """Equal values in every slot, written or not; every NaN in its place."""
    for cache, wanted in zip((call.k_cache, call.v_cache), want, strict=True):
        torch.testing.assert_close(cache.cpu().double(), wanted.double(), rtol=0, atol=0, equal_nan=True)


def merge_problem(dtype: torch.dtype, device: str = "cpu") -> tuple[MergeCall, Tensor, Tensor]:
    """Two states with strides of their own, rows that are empty on one side or on both, and their union."""
    random = torch.Generator().manual_seed(4)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.randn(2, 5, 3, 48, generator=random, dtype=torch.float64)[..., :40]
    lse = (torch.randn(2, 3, 5, generator=random, dtype=torch.float64) * 20).transpose(1, 2)
    for side, token in ((0, 1), (1, 2), (0, 3), (1, 3)):
        out[side, token], lse[side, token] = torch.nan, -torch.inf
    out, lse = out.to(dtype), lse.to(wide)
    want, want_lse = reference.merge_states(out[0].double(), lse[0].double(), out[1].double(), lse[1].double())
    call = MergeCall.of(out[0].to(device), lse[0].to(device), out[1].to(device), lse[1].to(device))
    return call, want.to(dtype), want_lse.to(wide)


def _values(case: Case, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    dtype = case.kv_dtype or case.dtype
    values = torch.randn(shape, generator=random)
    return (values * 40).round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)


def _caches(case: Case, pages: int) -> tuple[Tensor, Tensor]:
    """Poisoned K and V of logical shape ``[pages, page, heads, dim]`` in the layout of the case."""
    heads, page, (dim_qk, dim_v) = case.heads[1], case.page, case.dims
    if case.layout == "HND":
        return _poison(case, pages, heads, page, dim_qk).transpose(1, 2), _poison(
            case, pages, heads, page, dim_v
        ).transpose(1, 2)
    if case.layout == "interleaved":
        k, v = _poison(case, pages, 2, page, heads, max(dim_qk, dim_v)).unbind(1)
        return k[..., :dim_qk], v[..., :dim_v]
    if case.layout == "packed":
        both = _poison(case, pages, page, heads, dim_qk + dim_v)
        return both[..., :dim_qk], both[..., dim_qk:]
    if case.layout == "mla":
        k = _poison(case, pages, page, heads, dim_qk)
        return k, k[..., :dim_v]
    # NHD with NaN behind every head: what a tile wider than the head dim would read.
    return _poison(case, pages, page, heads, dim_qk + 16)[..., :dim_qk], _poison(case, pages, page, heads, dim_v + 16)[
        ..., :dim_v
    ]


def _poison(case: Case, *shape: int) -> Tensor:
    dtype = case.kv_dtype or case.dtype
    if dtype == torch.int8:
        return torch.full(shape, 127, dtype=dtype)
    return torch.full(shape, torch.nan).to(dtype)


def _scale(case: Case, pages: int, random: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
    """Scale values, and the tensor of the call (NaN where there are no tokens, filled by the caller)."""
    size = 1 / 40 if case.kv_dtype == torch.int8 else 1.0
    if case.scales == "none":
        return None, None
    if case.scales == "tensor":
        scale = torch.rand(1, generator=random) * size + size / 2
        return scale, scale[0]
    if case.scales == "head":
        scale = torch.rand(case.heads[1], generator=random) * size + size / 2
        return scale, scale
    scale = torch.rand(pages, case.page, case.heads[1], generator=random) * size + size / 2
    return scale, torch.full_like(scale, torch.nan)


def _to(device: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Move two caches that may share a storage, keeping strides and sharing."""
    storages: dict[int, Tensor] = {}

    def move(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage._cdata] = flat.to(device)
        flat = storages[storage._cdata].view(t.dtype)
        return flat.as_strided(t.shape, t.stride(), t.storage_offset())

    return (k, v) if device == "cpu" else (move(k), move(v))
