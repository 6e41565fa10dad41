"""One compile of one graph: chooses a chain per node, steps down it when a build fails, and writes the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tcport import _inductor, passes  # noqa: F401  (passes registers tcport's own)
from tcport.device import DeviceProfile, device_profile
from tcport.errors import KernelBuildError, TcportError
from tcport.fingerprint import fingerprint
from tcport.graph_pass import STAGES, PassContext, Stage
from tcport.lowering.candidate import Candidate
from tcport.lowering.operators import OPERATORS, NodeChoice, Operator, call_of_node, choose, device_of
from tcport.lowering.registry import rows
from tcport.lowering.spec import dim
from tcport.options import Options
from tcport.pass_manager import active_passes, run_passes
from tcport.report import CacheClone, FallbackReason, GraphReport, NodeReport, Rejected


def compile_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport
) -> Callable[..., Any]:
    """Compile an adapted Dynamo graph with Inductor, tcport's passes and lowerings in it.

    A kernel that does not build takes its tier out of the chain of every node, the step is recorded, and the graph is
    compiled again; the last link (plain PyTorch) leaves nothing of tcport's own to fail.

    Raises:
        KernelBuildError: a kernel did not build and ``strict`` forbids stepping down.
    """
    skipped: set[str] = set()
    while True:
        attempt = _Attempt(options, report, frozenset(skipped))
        try:
            return attempt.compile(gm, example_inputs)
        except Exception as error:
            if _inductor.must_pass_through(error):
                raise
            own = _cause_of_kind(error, TcportError)
            if own is not None and not isinstance(own, KernelBuildError):
                raise own from None
            failed = [c for c in attempt.emitted if c.tier != "torch"]
            if not failed:
                raise
            if options.strict or options.kernel:
                raise KernelBuildError(
                    f"Kernel {failed[0]} did not build: {_first_line(error)}.",
                    "Drop the options 'strict' and 'kernel' to step down the chain instead.",
                ) from error
            attempt.record_step_down(error)
            skipped |= {f"{c.kernel}/{c.tier}" for c in failed}


@dataclasses.dataclass
class _Attempt:
    """A single run of Inductor over the graph."""

    options: Options
    report: GraphReport
    skipped: frozenset[str]
    emitted: list[Candidate] = dataclasses.field(default_factory=list)
    cache_sizes: set[Any] = dataclasses.field(default_factory=set)

    def compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = self.report
        report.passes = [p for p in report.passes if p.stage == "dynamo"]  # those ran once, before this attempt
        report.nodes, report.clones, report.from_cache = [], [], True
        patches = {**_inductor.mode_patches(self.options.mode), **dict(self.options.inductor)}
        for name in _inductor.anonymous_user_passes(patches):
            report.notes.append(f"Inductor's cache is off: the custom pass {name} has no uuid().")
        return _inductor.compile_graph(
            gm,
            example_inputs,
            patches=patches,
            pipelines={
                "post_grad_custom_pre_pass": lambda graph: self._run_passes(graph, "functional"),
                "post_grad_custom_post_pass": lambda graph: self._run_passes(graph, "inplace"),
            },
            identity=self._identity(example_inputs),
            emitters=self._emitters(),
            audit=self._audit,
        )

    def record_step_down(self, error: Exception) -> None:
        """Note, for every node that had a kernel of tcport's, that its chain goes on without it."""
        for node in self.report.nodes:
            if node.tier != "torch":
                to = node.chain[1] if len(node.chain) > 1 else "nothing"
                kind = type(_inductor_cause(error)).__name__
                self.report.fallbacks.append(FallbackReason(node.node, node.kernel, to, kind, _first_line(error)))

    def _run_passes(self, graph: torch.fx.Graph, stage: Stage) -> None:
        run_stage(graph, stage, self.options, self.report)
        self.report.from_cache = False

    def _identity(self, example_inputs: Sequence[Any]) -> str:
        devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor)}
        profiles = sorted(device_profile(device).digest() for device in devices)
        own_passes = [p.identity() for stage in STAGES for p in active_passes(self.options, stage)]
        lowerings = [row.identity() for operator in OPERATORS for row in rows(operator.name)]
        own_options = dataclasses.replace(self.options, inductor=())
        return fingerprint([own_options, profiles, own_passes, lowerings, sorted(self.skipped)])

    def _emitters(self) -> dict[Any, Callable[[torch.fx.Node], _inductor.Emission]]:
        if self.options.debug:
            self.report.notes.append("debug: operators are called, checked and poisoned, instead of being lowered")
            return {}
        return {op.overload: lambda node, op=op: self._emit(op, node) for op in OPERATORS}

    def _emit(self, operator: Operator, node: torch.fx.Node) -> _inductor.Emission:
        choice: NodeChoice | None = node.meta.get("tcport")
        call = call_of_node(operator, node)
        if choice is None:
            choice = choose(operator, call, device_profile(device_of(call)), self.options.kernel)
        chain = [c for c in choice.selection.candidates if f"{c.kernel}/{c.tier}" not in self.skipped]
        chosen = chain[0]
        self.emitted.append(chosen)
        self.report.nodes.append(node_report(node, choice, chain))
        self.cache_sizes |= {dim(cache.numel()) for cache in operator.caches(call)}

        def run(*args: Any, **kwargs: Any) -> Any:
            return chosen.run(operator.call(*args, **kwargs), torch.library.wrap_triton)

        return _inductor.Emission(run, exact_strides=chosen.tier != "torch")

    def _audit(self, audit: _inductor.Audit) -> None:
        self.report.source = audit.source
        for buffer in audit.buffers:
            copied = any(_is_copy(node) for node in buffer.origins)
            if copied and buffer.numel in self.cache_sizes:
                origin = ", ".join(str(node.target) for node in buffer.origins)
                self.report.clones.append(CacheClone(buffer.name, buffer.bytes, origin))


def run_stage(graph: torch.fx.Graph, stage: Stage, options: Options, report: GraphReport) -> None:
    """Run the passes of one stage on a graph, and add their reports.

    Raises:
        OptionError, PassOrderError, PassError: see :func:`tcport.pass_manager.run_passes`.
    """
    context = PassContext(options, device_profile)
    report.passes += run_passes(graph, active_passes(options, stage), context, spent=len(report.passes))


def node_report(node: torch.fx.Node, choice: NodeChoice, chain: list[Candidate]) -> NodeReport:
    """What the report says of a node whose chain, failed links left out, is ``chain``."""
    chosen = chain[0]
    rejected = [
        Rejected(r.kernel, r.reason, str(r.config) if r.config else "") for r in choice.selection.rejections
    ] + [
        Rejected(c.kernel, "did not build", str(c.config) if c.config else "")
        for c in choice.selection.candidates
        if c not in chain
    ]
    return NodeReport(
        node=node.name,
        op=choice.operator.name,
        device=_device_line(choice.profile),
        kernel=chosen.kernel,
        tier=chosen.tier,
        tile=str(chosen.config) if chosen.config else "",
        why=chosen.why,
        chain=tuple(map(str, chain)),
        rejected=tuple(rejected),
    )


def _device_line(profile: DeviceProfile) -> str:
    return f"{profile.name or profile.arch or profile.vendor}" + (" (basic mode)" if profile.basic_mode else "")


def _is_copy(node: torch.fx.Node) -> bool:
    """Whether a graph node makes a buffer by copying one, rather than by gathering or computing."""
    aten = torch.ops.aten
    gathers = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default)
    return node.target not in gathers


def _cause_of_kind(error: BaseException | None, kind: type[TcportError]) -> TcportError | None:
    """The first error of a kind in a chain of causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


def _inductor_cause(error: BaseException) -> BaseException:
    """The exception that Inductor wrapped."""
    return getattr(error, "inner_exception", error)


def _first_line(error: BaseException) -> str:
    text = str(_inductor_cause(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
