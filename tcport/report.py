"""What a compile found, what it chose, and why: typed, as a dict, and as text."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Cause = Literal["build", "resources", "launch", "toolchain", "wrong numbers", "unavailable"]
"""Why a link of the chain was left.

``build``: the compiler refused the kernel. ``resources``: it needs more than the device has. ``launch``: it was built
and could not be started. ``toolchain``: no compiler works here (no assembler, no C compiler, no cache folder).
``wrong numbers``: its self-test failed. ``unavailable``: a package or file it needs is absent or was refused.
"""


@dataclasses.dataclass(frozen=True)
class Found:
    """A spelling of attention or of a cache write that the adapter rewrote.

    Attributes:
        spelling: the matcher's name.
        node: the graph node it started from.
        detail: what was understood, in one line.
    """

    spelling: str
    node: str
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """Something that looks like attention or a cache write and was not rewritten, with the reason."""

    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A kernel that was considered for a node and not used."""

    kernel: str
    reason: str
    tile: str = ""


@dataclasses.dataclass(frozen=True)
class FallbackReason:
    """A step down the chain: which kernel failed, how, and what took its place.

    Attributes:
        node: the first graph node, or the operator, that met the failure.
        kernel: the candidate that failed, with its tile. to: the one that took its place.
        error: class of the exception. message: its first line. details: the exception with its traceback.
    """

    node: str
    kernel: str
    to: str
    cause: Cause
    error: str
    message: str
    details: str = dataclasses.field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.node}: {self.kernel} -> {self.to}, {self.cause}: {self.error}: {self.message}"


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """The kernel of one node; ``footprint`` is what it takes when compiled, where that was looked at."""

    node: str
    op: str
    device: str
    kernel: str
    tier: str
    tile: str = ""
    why: str = ""
    chain: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    footprint: str = ""


@dataclasses.dataclass(frozen=True)
class PassReport:
    """One graph pass: how often it matched, the stage it ran at, and what it said about its work.

    Attributes:
        saved_operations: how many fewer operations there are. saved_bytes: what is no longer stored and loaded again;
            text where it depends on a size that is not fixed. Both are counted as if the graph ran operation by
            operation: a part of it, code that Inductor fuses saves without the pass.
    """

    name: str
    matches: int
    stage: str = "functional"
    notes: tuple[str, ...] = ()
    saved_operations: int = 0
    saved_bytes: int | str = 0


@dataclasses.dataclass(frozen=True)
class CacheClone:
    """A buffer as large as a KV cache that the generated code allocates to copy one.

    Attributes:
        buffer: its name in the generated code.
        bytes: its size; None when it depends on a symbol without a hint.
        origin: the graph nodes it came from.
    """

    buffer: str
    bytes: int | None
    origin: str


@dataclasses.dataclass
class GraphReport:
    """One compiled graph. ``from_cache`` means Inductor's cache answered and no pass or lowering ran."""

    found: list[Found] = dataclasses.field(default_factory=list)
    left_alone: list[LeftAlone] = dataclasses.field(default_factory=list)
    passes: list[PassReport] = dataclasses.field(default_factory=list)
    nodes: list[NodeReport] = dataclasses.field(default_factory=list)
    clones: list[CacheClone] = dataclasses.field(default_factory=list)
    fallbacks: list[FallbackReason] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    from_cache: bool = False
    source: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        return "\n".join(_graph_lines(self))

    def note(self, text: str) -> None:
        """Add a remark; a graph that is compiled again makes it once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclasses.dataclass
class CompileReport:
    """Everything one call of ``torch.compile(..., backend="tcport")`` did.

    Attributes:
        graphs: one report per compiled graph, in order of compilation.
        device: the device facts the choices rest on, one line.
        options: the options that were not at their defaults.
    """

    graphs: list[GraphReport] = dataclasses.field(default_factory=list)
    device: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def nodes(self) -> list[NodeReport]:
        """The nodes of all graphs."""
        return [node for graph in self.graphs for node in graph.nodes]

    @property
    def passes(self) -> list[PassReport]:
        """The passes of all graphs: each pass once a graph."""
        return [one for graph in self.graphs for one in graph.passes]

    @property
    def fallbacks(self) -> list[FallbackReason]:
        """The steps down the chain in all graphs."""
        return [step for graph in self.graphs for step in graph.fallbacks]

    @property
    def clones(self) -> list[CacheClone]:
        """The cache-sized copies of all graphs."""
        return [clone for graph in self.graphs for clone in graph.clones]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists, dicts and strings, for ``json.dumps``. Generated code is left out."""
        tree = dataclasses.asdict(self)
        for graph in tree["graphs"]:
            del graph["source"]
        return tree

    def __str__(self) -> str:
        lines = [f"tcport: {len(self.graphs)} graph(s){f' on {self.device}' if self.device else ''}"]
        if self.options:
            lines.append(f"options: {', '.join(f'{k}={v!r}' for k, v in self.options.items())}")
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number}{' (from the cache: no pass or lowering ran)' if graph.from_cache else ''}")
            lines += [f"  {line}" for line in _graph_lines(graph)]
        return "\n".join(lines)


def _graph_lines(graph: GraphReport) -> list[str]:
    lines = _repeated([f"found {f.spelling}" + (f": {f.detail}" if f.detail else "") for f in graph.found])
    lines += _repeated([f"left alone: {left.reason}" for left in graph.left_alone])
    for p in graph.passes:
        lines.append(f"pass {p.name}: {p.matches} match{'' if p.matches == 1 else 'es'}")
        if p.saved_operations or p.saved_bytes:
            moved = f"{p.saved_bytes} bytes" if isinstance(p.saved_bytes, str) else _size(p.saved_bytes)
            lines.append(f"    saves {p.saved_operations} operation(s) and {moved} of their stores and loads")
        lines += [f"    {note}" for note in _repeated(list(p.notes))]
    lines += _repeated([_node_text(node) for node in graph.nodes])
    lines += [f"FALLBACK {fallback}" for fallback in graph.fallbacks]
    lines += [f"CACHE COPY {c.buffer} ({_size(c.bytes)}) from {c.origin}" for c in graph.clones]
    if not graph.from_cache:
        lines += ["no cache-sized copies"] if not graph.clones else []
    return lines + graph.notes


def _node_text(node: NodeReport) -> str:
    text = f"{node.op} -> {node.kernel} [{node.tier}]{f' {node.tile}' if node.tile else ''}"
    if node.why:
        text += f" because {node.why}"
    if node.footprint:
        text += f"\n      compiled: {node.footprint}"
    for other in node.rejected:
        text += f"\n      not {other.kernel}{f' {other.tile}' if other.tile else ''}: {other.reason}"
    if len(node.chain) > 1:
        text += f"\n      then {', '.join(node.chain[1:])}"
    return text


def _repeated(lines: list[str]) -> list[str]:
    """Equal lines once, with their count: a model has one per layer."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line] = counts.get(line, 0) + 1
    return [f"{count} x {line}" if count > 1 else line for line, count in counts.items()]


def _size(count: int | None) -> str:
    if count is None:
        return "unknown size"
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"
