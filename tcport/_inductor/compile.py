"""A Dynamo graph compiled by Inductor with tcport's passes and lowerings in it, which are there for that long only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock
from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config, ir
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.runtime import autotune_cache
from torch._inductor.runtime.triton_heuristics import CompileResult
from torch._inductor.virtualized import V
from torch.utils._triton import has_triton

from tcport._inductor.audit import Audit, auditing
from tcport._inductor.blame import naming
from tcport._inductor.dynamo import original
from tcport._inductor.launch import launching_directly, with_short_launches
from tcport._inductor.lowering import Emit, Traces
from tcport._inductor.tracing import tracing_here
from tcport._inductor.user_passes import shared_slot


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    pipelines: Mapping[str, Callable[[torch.fx.Graph], None]],
    identity: str,
    emitters: Mapping[Any, Emit],
    audit: Callable[[Audit], None],
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor; nothing that is installed for it outlives the call.

    Args:
        gm: the graph as Dynamo captured it. example_inputs: its fake inputs.
        patches: Inductor config entries for this compile; the user's own custom passes are kept.
        pipelines: by Inductor's config entry for a custom graph pass, what runs there.
        identity: what stands for pipelines and emitters in Inductor's cache key.
        emitters: by operator overload, what lowers a node of it.
        audit: told about the generated code, when code is generated at all (a cache hit generates none).

    Returns:
        The compiled callable.
    """
    patches = dict(patches)
    for slot, pipeline in pipelines.items():
        patches[slot] = shared_slot(slot, pipeline, identity, patches)
    # Of blocks that overlapped, the last to end would leave what the other had installed. Dynamo compiles under its
    # lock; a graph whose kernel failed is compiled anew outside of Dynamo.
    with compile_lock, tracing_here(), _installed(emitters, audit):
        # Dynamo hides what a backend returns from itself: once is enough, and takes microseconds of every call.
        return original(compile_fx(gm, list(example_inputs), config_patches=patches))  # type: ignore[arg-type]


def interpret_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], rewrite: Callable[[torch.fx.GraphModule], None]
) -> Callable[..., Any]:
    """A Dynamo graph as its functional ATen graph, given to ``rewrite`` and then run operation by operation."""

    def interpret(functional: torch.fx.GraphModule, inputs: Sequence[Any], **unused: Any) -> Callable[..., Any]:
        rewrite(functional)
        functional.recompile()
        return make_boxed_func(functional.forward)

    return compile_fx(gm, list(example_inputs), interpret, {"force_disable_caches": True})  # type: ignore[arg-type]


@contextlib.contextmanager
def outside_dynamo(example_inputs: Sequence[Any]) -> Iterator[None]:
    """What Inductor needs around it where Dynamo does not call it: the fake mode of the graph's inputs."""
    with torch.no_grad(), tracing(TracingContext(detect_fake_mode(list(example_inputs)))):
        yield


@contextlib.contextmanager
def _installed(emitters: Mapping[Any, Emit], audit: Callable[[Audit], None]) -> Iterator[None]:
    """Inductor with tcport's lowerings and audit, for the length of a ``with`` block."""
    overloads = [*emitters, torch.ops.aten.sym_storage_offset.default]
    before = {overload: lowerings[overload] for overload in overloads if overload in lowerings}
    codegen = GraphLowering.codegen
    traces = Traces()
    for overload, emit in emitters.items():
        register_lowering(overload, type_promotion_kind=None)(traces.lowering(emit))
    if torch.ops.aten.sym_storage_offset.default not in lowerings:
        # Without it, in-graph views of one symbolic tensor are all written at offset 0 (pytorch#198068).
        register_lowering(torch.ops.aten.sym_storage_offset.default, type_promotion_kind=None)(_storage_offset)
    compile_triton, launcher_code = AsyncCompile.triton, CompileResult._gen_launcher_code
    asks_driver = autotune_cache.has_triton  # pyright: ignore[reportPrivateImportUsage]
    GraphLowering.codegen = auditing(codegen, audit)  # type: ignore[method-assign]
    AsyncCompile.triton = naming(launching_directly(compile_triton))  # type: ignore[method-assign]
    CompileResult._gen_launcher_code = with_short_launches(launcher_code)  # type: ignore[method-assign]
    autotune_cache.has_triton = _keys_remote_cache  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        GraphLowering.codegen = codegen  # type: ignore[method-assign]
        AsyncCompile.triton = compile_triton  # type: ignore[method-assign]
        CompileResult._gen_launcher_code = launcher_code  # type: ignore[method-assign]
        autotune_cache.has_triton = asks_driver  # pyright: ignore[reportPrivateImportUsage]
        for overload in overloads:
            lowerings.pop(overload, None)
        lowerings.update(before)


def _keys_remote_cache() -> bool:
    """Whether Inductor may ask Triton's driver for the key of a graph's tuned tiles.

    It asks for every graph that it generates code for or takes from its cache, and the driver is a C extension that is
    compiled for the purpose; but the key is used with a remote cache alone.
    """
    remote = config.autotune_remote_cache or config.bundled_autotune_remote_cache
    return bool(remote or config.is_fbcode()) and has_triton()  # pyright: ignore[reportPrivateImportUsage]


def _storage_offset(value: Any) -> Any:
    """The number that ``as_strided`` must be given to find the start of ``value`` again.

    Layouts count from the pointer of a graph input. From torch 2.13 ``as_strided`` counts from the start of the input's
    storage instead; confusing the two reads, and writes back, another tensor of that storage.
    """
    storage, layout = ir.as_storage_and_layout(value)
    data = storage.data if isinstance(storage, ir.StorageBox) else storage
    if not isinstance(data, ir.InputBuffer):
        return layout.offset
    return layout.offset + getattr(V.graph, "graph_input_storage_offsets", {}).get(data.get_name(), 0)
