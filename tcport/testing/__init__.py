"""A test kit for code that runs paged attention, and for graph passes and lowerings.

Batches with poison in every byte that must not matter: :func:`paged_batches` is a Hypothesis strategy
(``pip install tcport[test]``), :func:`build_batch` makes one by hand. Passes: :func:`capture` a graph,
:func:`run_pass`, :func:`assert_graph`, :func:`assert_equivalent`. Compiles: :func:`count_compiles`,
:func:`assert_no_clone`, :func:`inject_failure`, and :func:`lower_on` for devices that are not there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tcport.testing.batch import PagedBatch, build_batch, to_device
from tcport.testing.closeness import assert_close, tolerance
from tcport.testing.graph_lines import assert_graph
from tcport.testing.recipe import LAYOUTS, Recipe

if TYPE_CHECKING:
    from tcport.testing.compiles import assert_no_clone, count_compiles
    from tcport.testing.devices import check_lowering, inject_failure, lower_on
    from tcport.testing.equivalence import assert_equivalent
    from tcport.testing.graphs import capture, run_pass
    from tcport.testing.strategies import paged_batches, recipes

__all__ = [
    "LAYOUTS",
    "PagedBatch",
    "Recipe",
    "assert_close",
    "assert_equivalent",
    "assert_graph",
    "assert_no_clone",
    "build_batch",
    "capture",
    "check_lowering",
    "count_compiles",
    "inject_failure",
    "lower_on",
    "paged_batches",
    "recipes",
    "run_pass",
    "to_device",
    "tolerance",
]

_LAZY = {
    # These need Hypothesis, which a user of the rest may not have.
    "paged_batches": "strategies",
    "recipes": "strategies",
    # These import Inductor.
    "assert_equivalent": "equivalence",
    "assert_no_clone": "compiles",
    "capture": "graphs",
    "check_lowering": "devices",
    "count_compiles": "compiles",
    "inject_failure": "devices",
    "lower_on": "devices",
    "run_pass": "graphs",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tcport.testing.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'tcport.testing' has no attribute {name!r}")
