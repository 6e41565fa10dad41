"""``assert_equivalent``: passes may change how a result is computed, not the result, and not what is written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tcport.errors import PassMatchError
from tcport.report import GraphReport
from tcport.testing.closeness import assert_close
from tcport.testing.graphs import interpreted


def assert_equivalent(
    fn: Callable[..., Any],
    *args: Any,
    matches: Mapping[str, int] | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    exact: bool = False,
    examples: int = 20,
) -> GraphReport:
    """Fail unless ``fn`` does the same eagerly and with its graph rewritten by the passes.

    Results are compared to the rounding of their dtype; arguments afterwards byte for byte, whether they were written
    to or not, caches included, and a result shares memory with the same arguments. The rewritten graph runs operation
    by operation.

    Args:
        fn: a function or module.
        *args: its arguments. Arguments that share memory keep sharing it. A single Hypothesis strategy stands for many
            arguments: it draws their tuple.
        matches: by pass name, how many matches there must be in the first graph.
        dynamic, options: as in ``torch.compile(..., backend="tcport")``.
        exact: results are compared to the bit too.
        examples: how many a strategy draws.

    Returns:
        The report of the passes on the last compile.

    Raises:
        AssertionError: says which result or argument differs, and by how much.
        PassMatchError: another number of matches than was asked for.
    """
    report = GraphReport()
    rewritten = interpreted(fn, dynamic=dynamic, options=options, report=report)

    def compare(*drawn: Any) -> None:
        ours, theirs = copy.deepcopy(drawn), copy.deepcopy(drawn)
        expected, actual = fn(*theirs), rewritten(*ours)
        _compare(actual, expected, "result", exact)
        _compare(ours, theirs, "argument", True)
        _compare_sharing((actual, ours), (expected, theirs))

    torch.compiler.reset()
    if len(args) == 1 and hasattr(args[0], "example"):
        _for_all(args[0], compare, examples)
    else:
        compare(*args)
    for name, count in (matches or {}).items():
        found = next((p for p in report.passes if p.name == name), None)
        if found is None:
            ran = ", ".join(dict.fromkeys(p.name for p in report.passes)) or "none"
            raise PassMatchError(
                f"Pass {name!r} did not run; these did: {ran}.",
                "Import the module that registers it, and see that the options do not leave it out.",
            )
        if found.matches != count:
            left = f" It left: {'; '.join(found.notes)}." if found.notes else ""
            raise PassMatchError(
                f"Pass {name!r} matched {found.matches} times, not {count}.{left}",
                "Capture the graph and compare it with what the pass looks for.",
            )
    return report


def _for_all(strategy: Any, compare: Callable[..., None], examples: int) -> None:
    import hypothesis

    check = hypothesis.given(strategy)(lambda drawn: compare(*drawn))
    quiet = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    hypothesis.settings(max_examples=examples, deadline=None, suppress_health_check=quiet)(check)()


def _compare(actual: Any, expected: Any, what: str, exact: bool) -> None:
    ours, theirs = list(_leaves(actual)), list(_leaves(expected))
    if len(ours) != len(theirs):
        raise AssertionError(f"there are {len(ours)} {what}s, expected {len(theirs)}")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(b, Tensor):
            _compare_tensors(a, b, f"{what} {number}", exact)
        elif a != b:
            raise AssertionError(f"{what} {number} is {a!r}, expected {b!r}")


def _compare_sharing(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Results share memory with the same arguments: a snapshot must not change when its original does."""
    ours, theirs = (_shared_arguments(*pair) for pair in (actual, expected))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise AssertionError(f"result {number} shares memory with the arguments {sorted(a)}, expected {sorted(b)}")


def _shared_arguments(results: Any, arguments: Any) -> list[set[int]]:
    def storage(value: Any) -> int:
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) and value.numel() else 0

    owners = [storage(value) for value in _leaves(arguments)]
    return [
        {number for number, owner in enumerate(owners) if owner and owner == storage(result)}
        for result in _leaves(results)
    ]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, torch.nn.Module):
        value = tuple(value.state_dict(keep_vars=True).values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _compare_tensors(actual: Tensor, expected: Tensor, what: str, exact: bool) -> None:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise AssertionError(
            f"{what} is {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
    if exact or not expected.dtype.is_floating_point or expected.dtype.itemsize == 1:
        a, b = (value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in (actual, expected))
        if not torch.equal(a, b):
            size = expected.element_size()
            wrong = (a != b).view(-1, size).any(1)
            raise AssertionError(f"{what} differs in {int(wrong.sum())} of {wrong.numel()} elements")
        return
    assert_close(actual, expected, what=what)
