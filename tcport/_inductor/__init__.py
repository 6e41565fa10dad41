"""Everything tcport needs from the private parts of torch. No other package may name them.

Written for torch 2.11 up to the newest tested version; differences between versions are evened out here.
"""

from __future__ import annotations

from tcport._inductor.audit import Audit, Buffer
from tcport._inductor.compile import compile_graph, interpret_graph, outside_dynamo
from tcport._inductor.dynamo import (
    compile_count,
    in_dynamo,
    must_pass_through,
    original,
    register_in_any_thread,
    unwrapped,
)
from tcport._inductor.fake_values import concrete
from tcport._inductor.lowering import Emission, Emit
from tcport._inductor.settings import config_names, mode_patches
from tcport._inductor.user_passes import anonymous_user_passes

__all__ = [
    "Audit",
    "Buffer",
    "Emission",
    "Emit",
    "anonymous_user_passes",
    "compile_count",
    "compile_graph",
    "concrete",
    "config_names",
    "in_dynamo",
    "interpret_graph",
    "mode_patches",
    "must_pass_through",
    "original",
    "outside_dynamo",
    "register_in_any_thread",
    "unwrapped",
]
