"""Names of Gluon that changed between Triton 3.6 and 3.9, under the newer one."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
