"""``torch.compile(model, backend="tcport")``: the entry point that torch finds by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from tcport import _inductor, debug, history
from tcport.adapter import adapt
from tcport.argument_types import wrong_among
from tcport.attempt import devices_of, run_stage
from tcport.attention_only import attention_only
from tcport.compilation import compile_graph
from tcport.device.live import watch_if_wanted
from tcport.errors import OptionError, TcportError
from tcport.invalid import first_invalid_call, postpone
from tcport.operator_library import postpone_refusals
from tcport.options import Options, parse_options
from tcport.report import Found, GraphReport, LeftAlone

postpone_refusals(postpone)
torch.compiler.assume_constant_result(wrong_among)
_inductor.register_in_any_thread("tcport")


def tcport(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Compile a graph captured by Dynamo.

    Args:
        gm: the graph, before AOTAutograd.
        example_inputs: its fake inputs.
        mode: as in ``torch.compile``.
        options: see :class:`tcport.options.Options`; Inductor's own config entries are accepted beside them.

    Returns:
        A callable with the graph's signature.

    Raises:
        TcportError: of the class that names the cause; it reaches the caller of the compiled model as it is.
    """
    try:
        if unknown:
            names = ", ".join(sorted(unknown))
            raise OptionError(f"The backend was given unknown arguments: {names}.", "Put them into options={...}.")
        parsed = parse_options(mode, options, _inductor.config_names)
        return compile_adapted(gm, example_inputs, parsed)
    except TcportError as error:
        raise _inductor.unwrapped(error) from error.__cause__


def compile_adapted(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Adapt, check and compile one graph; its report goes to the history."""
    invalid = first_invalid_call(gm)
    if invalid is not None:
        raise invalid
    for device_type in {device.type for device in devices_of(example_inputs)}:
        watch_if_wanted(device_type)
    report = GraphReport()
    run_stage(gm.graph, "dynamo", options, report)
    gm.recompile()
    adapted = adapt(gm)
    report.found = [Found(m.matcher, m.node.name, "; ".join((m.kind, *m.notes))) for m in adapted.matches]
    report.left_alone = [LeftAlone(r.node.name, f"[{r.rule}] {r.reason}") for r in adapted.rejections]
    if debug.is_on() and not options.debug:
        options = dataclasses.replace(options, debug=True)
    if options.level == "attention":
        compiled = attention_only(gm, options, report)
    else:
        compiled = compile_graph(gm, example_inputs, options, report)
    history.record(report, options)
    return _in_debug_mode(compiled) if options.debug else compiled


def _in_debug_mode(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with debug.debug_mode():
            return compiled(*args)

    return run
