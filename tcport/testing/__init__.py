"""A test kit for code that runs paged attention: batches with poison in every byte that must not matter.

:func:`paged_batches` is a Hypothesis strategy (``pip install tcport[test]``); the rest needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tcport.testing.batch import PagedBatch, build_batch, to_device
from tcport.testing.closeness import assert_close, tolerance
from tcport.testing.recipe import LAYOUTS, Recipe

if TYPE_CHECKING:
    from tcport.testing.strategies import paged_batches, recipes

__all__ = [
    "LAYOUTS",
    "PagedBatch",
    "Recipe",
    "assert_close",
    "build_batch",
    "paged_batches",
    "recipes",
    "to_device",
    "tolerance",
]


def __getattr__(name: str) -> Any:
    if name in ("paged_batches", "recipes"):  # need Hypothesis, which a user of the rest may not have
        return getattr(importlib.import_module("tcport.testing.strategies"), name)
    raise AttributeError(f"module 'tcport.testing' has no attribute {name!r}")
