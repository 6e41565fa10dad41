"""The operators ``tcport::paged_attention``, ``kv_write`` and ``merge_states`` as the dispatcher knows them.

Whatever carries an operator out, this is its schema, fake, and autocast and autograd rules. The implementations are
bound in :mod:`tcport.eager`; :mod:`tcport.ops` has the functions that users call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tcport import checks
from tcport.argument_types import refuse_type
from tcport.errors import TcportError
from tcport.inference_only import define_refusal, forbid_backward
from tcport.kernels import reference

LIBRARY = torch.library.Library("tcport", "DEF")

# flexible_layout: the kernels follow whatever strides they get, so Inductor must never copy an input (a cache least of
# all) to give it others.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_AUTOCAST_DEVICES = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_AUTOCAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def define_twin(name: str, of: str, run: Callable[..., Any], *, more: str = "") -> None:
    """Define an operator that takes and returns what another does, for code that must call one kernel and no other.

    Args:
        more: arguments besides, by name, that the result's shape does not depend on, such as ``"str tile"``.
    """
    arguments, fake = _DEFINED[of]
    if more:
        arguments = arguments.replace(") -> ", f", {more}) -> ")
        fake = _without({one.split()[-1].partition("=")[0] for one in more.split(",")}, fake)
    _define(name, arguments, fake)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")


def postpone_refusals(take: Callable[[TcportError], bool]) -> None:
    """Set who is asked before a fake raises on an invalid call; the fake stays silent where ``take(error)`` is True.

    Dynamo wraps what a fake raises in an error of its own. While it traces for a backend that validates the calls of
    its graph by itself, the fakes give a plausible result, and the caller gets the tcport error unwrapped.
    """
    global _take
    _take = take


def result_dtype(query: Tensor, k_cache: Tensor) -> torch.dtype:
    """The query's dtype, once autocast has had its say."""
    kind = query.device.type
    if kind not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind) or query.dtype not in _AUTOCAST_DTYPES:
        return query.dtype
    return _autocast_dtype(k_cache, kind)


def _refuse(error: TcportError) -> bool:
    return False


_take: Callable[[TcportError], bool] = _refuse


def _checked(check: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        check(*args, **kwargs)
    except TcportError as error:
        if not _take(error):
            raise


def _without(extra: set[str], fake: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: fake(*args, **{name: value for name, value in options.items() if name not in extra})


_DEFINED: dict[str, tuple[str, Callable[..., Any]]] = {}


def _define(name: str, arguments: str, fake: Callable[..., Any]) -> None:
    _DEFINED[name] = (arguments, fake)
    LIBRARY.define(f"{name}{arguments}", tags=TAGS)
    torch.library.register_fake(f"tcport::{name}", fake, lib=LIBRARY)


def _autocast_dtype(k_cache: Tensor, device_type: str) -> torch.dtype:
    """Query and cache meet in one dtype: the cache's own, since a cache is never converted.

    A quantised cache has no such dtype; there the query takes autocast's, as in torch's own attention.
    """
    return k_cache.dtype if k_cache.dtype in checks.FLOAT_DTYPES else torch.get_autocast_dtype(device_type)


def _fake_paged_attention(query: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any) -> Any:
    _checked(checks.check_paged_attention, query, k_cache, v_cache, *args, **options)
    lse_shape = query.shape[:-1] if options.get("return_lse", False) else (0,)
    out = query.new_empty((*query.shape[:-1], *v_cache.shape[-1:]))
    return out, query.new_empty(lse_shape, dtype=torch.float32)


def _fake_kv_write(*args: Any, **options: Any) -> None:
    _checked(checks.check_kv_write, *args, **options)


def _fake_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _checked(checks.check_merge_states, out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_merge_states(out_a, lse_a, out_b, lse_b)
    return reference.merge_states(out_a, lse_a, out_b, lse_b)


def _autocast_kernel(device_type: str) -> Callable[..., Any]:
    """The operator under autocast."""

    def kernel(query: Tensor, k_cache: Tensor, *args: Any, **options: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            if query.dtype in _AUTOCAST_DTYPES:
                query = query.to(_autocast_dtype(k_cache, device_type))
            return torch.ops.tcport.paged_attention.default(query, k_cache, *args, **options)

    return kernel


_define(
    "paged_attention",
    "(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q=None, *, "
    "float? scale=None, bool causal=True, int? window=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? mask=None, int? chunk=None, "
    "int? num_splits=None, bool batch_invariant=False, bool return_lse=False) -> (Tensor out, Tensor lse)",
    _fake_paged_attention,
)
_define(
    "kv_write",
    "(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    _fake_kv_write,
)
_define(
    "merge_states", "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)", _fake_merge_states
)
LIBRARY.impl("merge_states", _merge_states, "CompositeExplicitAutograd")
# Refusals that Python code makes beside the operators, as operators of their own: see `postpone_refusals`.
for _name, _arguments, _check in (
    ("check_out", "(Tensor out, Tensor query, Tensor v_cache, ScalarType dtype) -> ()", checks.check_out),
    ("check_shared_pages", "(Tensor block_table, SymInt shared_pages) -> ()", checks.check_shared_pages),
    ("refuse_type", "(str cause, str remedy) -> ()", refuse_type),
):
    _define(_name, _arguments, functools.partial(_checked, _check))
    LIBRARY.impl(_name, _check, "CompositeExplicitAutograd")
# What kv_write stores carries no gradient, and it takes keys and values of any float dtype: nothing to do in either.
LIBRARY.impl("kv_write", torch.library.fallthrough_kernel, "Autograd")
for _device_type, _key in _AUTOCAST_DEVICES.items():
    LIBRARY.impl("paged_attention", _autocast_kernel(_device_type), _key)
define_refusal(LIBRARY, TAGS)
forbid_backward(LIBRARY, "paged_attention")
forbid_backward(LIBRARY, "merge_states")
