"""tcport: paged attention for torch.compile, fitted to the GPU it runs on.

Importing this package registers operators and touches no driver, no CUDA context and no Inductor.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tcport import eager as eager  # binds the implementations of the operators
from tcport.cache_folders import settle_before_dynamo
from tcport.counting import counters
from tcport.debug import debug_mode
from tcport.device import device_profile
from tcport.graph_pass import PassContext, register_pass, registered_pass, unregister_pass
from tcport.history import last_report
from tcport.ops import kv_write, merge_states, paged_attention
from tcport.shared_prefix import shared_prefix_attention

if TYPE_CHECKING:
    from tcport._inductor import compile_count
    from tcport.adapter.registry import register_matcher, unregister_matcher
    from tcport.explainer import explain
    from tcport.lowering.registry import register_lowering, unregister_lowering

__all__ = [
    "PassContext",
    "__version__",
    "compile_count",
    "counters",
    "debug_mode",
    "device_profile",
    "explain",
    "kv_write",
    "last_report",
    "merge_states",
    "paged_attention",
    "register_lowering",
    "register_matcher",
    "register_pass",
    "registered_pass",
    "shared_prefix_attention",
    "unregister_lowering",
    "unregister_matcher",
    "unregister_pass",
]

__version__ = "0.1.0"

settle_before_dynamo()

_LAZY = {
    "compile_count": "tcport._inductor",
    "explain": "tcport.explainer",  # imports Inductor
    "register_lowering": "tcport.lowering.registry",
    "register_matcher": "tcport.adapter.registry",
    "unregister_lowering": "tcport.lowering.registry",
    "unregister_matcher": "tcport.adapter.registry",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tcport' has no attribute {name!r}")
