"""One run of Inductor over one graph, with tcport's passes and lowerings in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from tcport import _inductor, passes, pattern_engine, quarantine  # noqa: F401  (what two of them register is used)
from tcport._inductor.blame import failed_call, failed_kernel
from tcport._inductor.lowering import Emission, Emit, has_code_for
from tcport._inductor.race import Race, Way, real_tensors
from tcport.bundle.store import bundles
from tcport.chain import screened, step_down, survivors
from tcport.describe import node_report
from tcport.device import DeviceProfile, device_profile
from tcport.emission import Emitted
from tcport.errors import TcportError
from tcport.fingerprint import fingerprint
from tcport.functional_write import memory_of
from tcport.graph_pass import STAGES, PassContext, Stage
from tcport.lowering.candidate import Candidate, Terms
from tcport.lowering.operators import NodeChoice, Operator, all_operators, call_of_node, choose, device_of, operator_of
from tcport.lowering.registry import registered_operators, rows
from tcport.lowering.results import check_results
from tcport.lowering.spec import dim
from tcport.options import Options
from tcport.pass_checks import exempt
from tcport.pass_manager import active_passes, run_passes
from tcport.race import Entrant, contenders, entered
from tcport.repeatable import unrepeatable
from tcport.report import CacheClone, Cause, GraphReport

exempt(has_code_for)

Failed = tuple[Emitted, Candidate]
"""A node as it was lowered, and the one of its kernels that failed."""


def devices_of(example_inputs: Sequence[Any]) -> set[torch.device]:
    """Where a graph's tensors are.

    Numbers say nothing of it: a Python float whose value is left open is one on the CPU, whatever computes with it, and
    to know the state of the CPU's kernels is to build them.
    """
    return {value.device for value in example_inputs if isinstance(value, torch.Tensor) and value.dim() > 0}


@dataclasses.dataclass
class Attempt:
    """A run of Inductor, and what is known of the kernels in it.

    Attributes:
        use_cache: whether Inductor may answer from its cache, and nothing be known.
        emitted: the nodes that were lowered.
        broken_off: the node whose candidate raised while it was lowered, the kernel of it, and what was raised.
        refused: what the chain of a node raised where it had no link to give.
        unrepeatable: what keeps a graph that was broken off from being run again; None: nothing does.
    """

    options: Options
    report: GraphReport
    use_cache: bool = True
    emitted: list[Emitted] = dataclasses.field(default_factory=list)
    broken_off: tuple[Emitted, Candidate, Exception] | None = None
    refused: TcportError | None = None
    unrepeatable: str | None = "a graph that came from the cache"
    _cache_sizes: set[Any] = dataclasses.field(default_factory=set)

    def compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = self.report
        report.passes = [p for p in report.passes if p.stage == "dynamo"]  # those ran once, before this attempt
        report.nodes, report.clones, report.from_cache = [], [], True
        patches = {**_inductor.mode_patches(self.options.mode), **dict(self.options.inductor)}
        for name in _inductor.anonymous_user_passes(patches):
            report.note(f"Inductor's cache is off: the custom pass {name} has no uuid().")
        if not self.use_cache:
            patches["force_disable_caches"] = True
        return _inductor.compile_graph(
            gm,
            example_inputs,
            patches=patches,
            pipelines={
                "post_grad_custom_pre_pass": self._run_functional,
                "post_grad_custom_post_pass": lambda graph: self._run_passes(graph, "inplace"),
            },
            identity=self._identity(gm, example_inputs),
            emitters=self._emitters(),
            audit=self._audit,
        )

    @property
    def may_fail_at_launch(self) -> bool:
        """Whether the compiled graph holds a kernel that has links behind it."""
        return self.report.from_cache or any(e.candidate.may_fail for e in self.emitted)

    def blamed(self, error: BaseException) -> list[Failed]:
        """The kernels behind a failure: known exactly where the failure names one, else all that may fail."""
        named, line = failed_kernel(error), failed_call(error)
        if named is not None:
            return self._of_each(lambda emitted: emitted.makers(*named))
        if line is not None:
            exact = self._of_each(lambda emitted: emitted.callers(line, exactly=True))
            return exact or self._of_each(lambda emitted: emitted.callers(line, exactly=False))
        return self._of_each(lambda emitted: emitted.candidate.kernels)

    def step_down(self, failed: Sequence[Failed], error: BaseException, cause: Cause) -> None:
        """Take kernels that failed out of their chains; layers that share a kernel share the step."""
        distinct = {quarantine.keys_of(e.choice, e.candidate)[kernel]: (e, kernel) for e, kernel in reversed(failed)}
        for e, kernel in reversed(distinct.values()):
            reason = step_down(e.choice, e.candidate, kernel, error, cause, node=e.node, strict=self.options.strict)
            self.report.fallbacks.append(reason)

    def _of_each(self, kernels: Callable[[Emitted], Sequence[Candidate]]) -> list[Failed]:
        """Those of the kernels of each node that may fail."""
        return [(emitted, kernel) for emitted in self.emitted for kernel in kernels(emitted) if kernel.may_fail]

    def _run_functional(self, graph: torch.fx.Graph) -> None:
        self.unrepeatable = unrepeatable(graph)
        self._run_passes(graph, "functional")

    def _run_passes(self, graph: torch.fx.Graph, stage: Stage) -> None:
        run_stage(graph, stage, self.options, self.report)
        self.report.from_cache = False

    def _identity(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> str:
        devices = devices_of(example_inputs)
        profiles = sorted(device_profile(device).digest() for device in devices)
        vendors = {device_profile(device).vendor for device in devices}
        states = [row.state_for(vendors) for operator in _called(gm) for row in rows(operator.name)]
        own_passes = [p.identity() for stage in STAGES for p in active_passes(self.options, stage)]
        lowerings = [row.identity() for name in registered_operators() for row in rows(name)]
        prebuilt = [(str(bundle.folder), bundle.digest()) for bundle in bundles()[0]]
        own_options = dataclasses.replace(self.options, inductor=())
        return fingerprint([own_options, profiles, own_passes, lowerings, states, prebuilt, quarantine.keys()])

    def _emitters(self) -> dict[Any, Emit]:
        if self.options.debug:
            self.report.note("debug: operators are called, checked and poisoned, instead of being lowered")
            return {}
        return {op.overload: lambda node, op=op: self._emit(op, node) for op in all_operators()}

    def _emit(self, operator: Operator, node: torch.fx.Node) -> Emission | Race:
        try:
            return self._lowered(operator, node)
        except TcportError as error:
            self.refused = error  # it comes out of Inductor wrapped, as does what a kernel raises and can be survived
            raise

    def _lowered(self, operator: Operator, node: torch.fx.Node) -> Emission | Race:
        call = call_of_node(operator, node)
        choice: NodeChoice = node.meta.get("tcport") or choose(
            operator, call, device_profile(device_of(call)), self.options.kernel
        )
        racing = isinstance(self.options.kernel, tuple) or self.options.autotunes
        screened(choice, node=node.name, strict=self.options.strict, every=racing)
        self._cache_sizes |= {dim(cache.numel()) for cache in operator.caches(call)}
        self._cache_sizes |= {dim(base.numel()) for base in _bases_of_caches(operator, node)}
        ways = self._raced(node, choice)
        if len(ways) < 2:
            return self._emission(node, choice, ways[0].link if ways else survivors(choice)[0])
        why = f"the fastest of {len(ways)} that Inductor timed"
        return Race(
            f"tcport_{operator.name}",
            device_of(call),
            [
                Way(str(way.link), way.identity, way.run, lambda link=way.link: self._emission(node, choice, link, why))
                for way in ways
            ],
        )

    def _raced(self, node: torch.fx.Node, choice: NodeChoice) -> list[Entrant]:
        """The links that are asked to race for a node, those left out that failed on an example."""
        links = contenders(choice, self.options)
        if len(links) < 2:
            return []
        call = call_of_node(choice.operator, node, convert=_inductor.concrete)
        with real_tensors():
            entrants, failed = entered(choice, links, call)
        for link, kernel, error, cause in failed:
            emitted = Emitted(node.name, choice, link)
            self.step_down([(emitted, kernel)], error, cause)
        return entrants

    def _emission(self, node: torch.fx.Node, choice: NodeChoice, link: Candidate, why: str = "") -> Emission:
        terms = Terms.of(self.options.kernel, self.options.strict)
        emitted = Emitted(node.name, choice, link, terms=terms)
        self.emitted.append(emitted)
        self.report.nodes.append(node_report(node, choice, link, why))

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                results = emitted.run(*args, **kwargs)
                if node.target is choice.operator.overload and not link.plain:
                    check_results(link, results, node.meta.get("val"))
                return results
            except Exception as error:
                self.broken_off = (emitted, emitted.running or emitted.candidate, error)
                raise

        def failed(error: Exception) -> None:
            if self.broken_off is None and link != choice.selection.candidates[-1]:
                self.broken_off = (emitted, emitted.running or emitted.candidate, error)

        notes = (emitted.launches, emitted.calls)
        return Emission(run, exact_strides=not emitted.candidate.plain, alike=link, notes=notes, failed=failed)

    def _audit(self, audit: _inductor.Audit) -> None:
        self.report.source = audit.source
        for buffer in audit.buffers:
            copied = any(_is_copy(node) for node in buffer.origins)
            if copied and buffer.numel in self._cache_sizes:
                origin = ", ".join(str(node.target) for node in buffer.origins)
                self.report.clones.append(CacheClone(buffer.name, buffer.bytes, origin))


def run_stage(
    graph: torch.fx.Graph,
    stage: Stage,
    options: Options,
    report: GraphReport,
    profile: Callable[[torch.device], DeviceProfile] = device_profile,
) -> None:
    """Run the passes of one stage on a graph, and add their reports.

    Args:
        profile: the facts of a device; another function pretends another device.

    Raises:
        OptionError, PassOrderError, PassError: see :func:`tcport.pass_manager.run_passes`.
    """
    context = PassContext(options, profile)
    report.passes += run_passes(graph, active_passes(options, stage), context, spent=len(report.passes))


def _called(gm: torch.fx.GraphModule) -> list[Operator]:
    """The operators that a graph, or a graph within it, calls."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    found = {operator_of(node) for graph in graphs for node in graph.nodes}
    return [operator for operator in all_operators() if operator in found]


def _bases_of_caches(operator: Operator, node: torch.fx.Node) -> list[torch.Tensor]:
    """The tensors that the caches of a node are views of, a pool of layers for instance."""
    names = [argument.name for argument in operator.overload._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given = [arguments.get(name) for name in ("k_cache", "v_cache")]
    values = [memory_of(cache).meta.get("val") for cache in given if isinstance(cache, torch.fx.Node)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_copy(node: torch.fx.Node) -> bool:
    """Whether a graph node makes a buffer by copying one, rather than by gathering or computing."""
    aten = torch.ops.aten
    gathers = (aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default)
    return node.target not in gathers
