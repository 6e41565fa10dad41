"""Everything tcport needs from the private parts of torch. No other module may name them.

Written for torch 2.11 up to the newest tested version; differences between versions are evened out here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, SkipFrame
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config, ir
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import lowerings, register_lowering
from torch._inductor.runtime import autotune_cache
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._triton import has_triton

from tcport._inductor_blame import naming
from tcport._inductor_lowering import Emit, Traces


@dataclasses.dataclass(frozen=True)
class Audit:
    """What Inductor generated for a graph: the source, and buffers that are as large as a graph input."""

    source: str
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer the generated code allocates: its name, number of elements, dtype, and the graph nodes behind it."""

    name: str
    numel: sympy.Expr
    dtype: torch.dtype
    bytes: int | None
    origins: tuple[torch.fx.Node, ...]


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
        patches[slot] = _Pipeline(pipeline, identity, _user_passes(patches, slot), slot == _LAST_SLOT)
    # Of blocks that overlapped, the last to end would leave what the other had installed. Dynamo compiles under its
    # lock; a graph whose kernel failed is compiled anew outside of Dynamo.
    with compile_lock, _installed(emitters, audit):
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


def mode_patches(mode: str) -> dict[str, Any]:
    """The Inductor config entries behind a ``torch.compile`` mode."""
    return {} if mode == "default" else dict(torch._inductor.list_mode_options(mode))  # type: ignore[arg-type]


def config_names() -> list[str]:
    """The names of Inductor's config entries, those included that stand for an entry of another module."""
    return list(config._config)  # pyright: ignore[reportAttributeAccessIssue]


def anonymous_user_passes(patches: Mapping[str, Any]) -> list[str]:
    """Names of the user's own custom passes that have no identity, which makes Inductor skip its cache."""
    return [
        getattr(user_pass, "__name__", type(user_pass).__name__)
        for slot in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
        for user_pass in _user_passes(dict(patches), slot)
        if not isinstance(user_pass, CustomGraphPass) or user_pass.uuid() is None
    ]


def must_pass_through(error: BaseException) -> bool:
    """Whether an exception is one of Dynamo's signals, which a backend must never swallow."""
    return isinstance(error, (RestartAnalysis, SkipFrame))


def unwrapped(error: Exception) -> Exception:
    """An error of the same class and text that Dynamo hands to the user as it is, not as BackendCompilerFailed."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__str__": kind.__str__}
    bare = type(kind.__name__, (kind, ShortenTraceback), names)  # pyright: ignore[reportGeneralTypeIssues]
    twin = bare.__new__(bare, *error.args)
    twin.__dict__.update(error.__dict__, first_useful_frame=None)
    return twin


@contextlib.contextmanager
def outside_dynamo(example_inputs: Sequence[Any]) -> Iterator[None]:
    """What Inductor needs around it where Dynamo does not call it: the fake mode of the graph's inputs."""
    with torch.no_grad(), tracing(TracingContext(detect_fake_mode(list(example_inputs)))):
        yield


def original(fn: Any) -> Any:
    """The function or module behind a compiled one; anything else as it is."""
    return getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None) or fn


def concrete(value: Any) -> Any:
    """A fake tensor of the sizes that the graph is being compiled for, so that a message can name numbers.

    Sizes without such a number (unbacked symbols) leave the tensor as it is, and so is anything but a tensor.
    """
    if not isinstance(value, torch.Tensor):
        return value
    hints = [_hint(size) for size in (*value.shape, *value.stride())]
    numbers = [hint for hint in hints if hint is not None]
    if len(numbers) < len(hints):
        return value
    with unset_fake_temporarily(), FakeTensorMode():
        return torch.empty_strided(
            numbers[: value.dim()], numbers[value.dim() :], dtype=value.dtype, device=value.device
        )


def compile_count() -> int:
    """Graphs that Dynamo has handed to a backend in this process, whichever backend it was."""
    return counters["stats"]["unique_graphs"]


def in_dynamo() -> bool:
    """Whether a graph is being captured or compiled for ``torch.compile`` in this thread."""
    return TracingContext.try_get() is not None


_LAST_SLOT = "post_grad_custom_post_pass"


class _Pipeline(CustomGraphPass):
    """tcport's passes as Inductor sees them, and the user's own: after tcport's, or before them in the last slot, where
    tcport's leave a graph that is no longer functional.

    A new pass object per compile would make config comparisons fail, and pickling it would drag the report along:
    equality and pickle go by the identity alone.
    """

    def __init__(
        self,
        run: Callable[[torch.fx.Graph], None] | None,
        identity: str,
        user_passes: tuple[Any, ...],
        users_first: bool = False,
    ) -> None:
        self._run = run
        self._identity = identity
        self._user_passes = user_passes
        self._users_first = users_first

    def __call__(self, graph: torch.fx.Graph) -> None:
        own = () if self._run is None else (self._run,)
        order = (*self._user_passes, *own) if self._users_first else (*own, *self._user_passes)
        for graph_pass in order:
            graph_pass(graph)

    def uuid(self) -> Any | None:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._user_passes]
        return None if None in ids else (self._identity, *ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Pipeline, (None, self._identity, ()))


def _user_passes(patches: dict[str, Any], slot: str) -> tuple[Any, ...]:
    """The user's passes for a slot that tcport uses, taken out of ``patches``; the global config's otherwise."""
    given = patches.pop(slot, getattr(config, slot))
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


@contextlib.contextmanager
def _installed(emitters: Mapping[Any, Emit], audit: Callable[[Audit], None]) -> Iterator[None]:
    """Inductor with tcport's lowerings and audit, for the length of a ``with`` block."""
    overloads = [*emitters, torch.ops.aten.sym_storage_offset.default]
    before = {overload: lowerings[overload] for overload in overloads if overload in lowerings}
    codegen = GraphLowering.codegen

    def audited_codegen(graph: GraphLowering) -> Any:
        result = codegen(graph)
        audit(Audit(getattr(result[0], "value", ""), tuple(_allocated(graph))))
        return result

    traces = Traces()
    for overload, emit in emitters.items():
        register_lowering(overload, type_promotion_kind=None)(traces.lowering(emit))
    if torch.ops.aten.sym_storage_offset.default not in lowerings:
        # Without it, in-graph views of one symbolic tensor are all written at offset 0 (pytorch#198068).
        register_lowering(torch.ops.aten.sym_storage_offset.default, type_promotion_kind=None)(_storage_offset)
    compile_triton = AsyncCompile.triton
    asks_driver = autotune_cache.has_triton  # pyright: ignore[reportPrivateImportUsage]
    GraphLowering.codegen = audited_codegen  # type: ignore[method-assign]
    AsyncCompile.triton = naming(compile_triton)  # type: ignore[method-assign]
    autotune_cache.has_triton = _keys_remote_cache  # pyright: ignore[reportPrivateImportUsage]
    try:
        yield
    finally:
        GraphLowering.codegen = codegen  # type: ignore[method-assign]
        AsyncCompile.triton = compile_triton  # type: ignore[method-assign]
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


def _hint(size: int | torch.SymInt) -> int | None:
    return size.node.hint if isinstance(size, torch.SymInt) else size


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


def _allocated(graph: GraphLowering) -> Iterator[Buffer]:
    """The buffers of a lowered graph that get memory of their own."""
    for buffer in graph.buffers:
        layout = buffer.layout if isinstance(getattr(buffer, "layout", None), ir.Layout) else None
        if layout is None or isinstance(layout, (ir.MutationLayoutSHOULDREMOVE, ir.NonOwningLayout)):
            continue
        numel = sympy.sympify(sympy.prod(layout.size))
        size = graph.sizevars.optimization_hint(numel, fallback=0) * layout.dtype.itemsize
        origins = tuple(sorted(buffer.origins, key=lambda n: n.name))
        yield Buffer(buffer.get_name(), numel, layout.dtype, size or None, origins)
