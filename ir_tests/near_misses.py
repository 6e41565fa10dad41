"""What the tables of near misses share: a problem, the parts of an attention, and the check that nothing matches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from adapter_harness import problem, run
from torch import Tensor

from tcport.adapter import RULES

GIVEN = problem()
Q, K_CACHE, V_CACHE, TABLE, LENS = GIVEN.args
RANDOM = torch.Generator().manual_seed(9)


def gathered(cache: Tensor, table: Tensor) -> Tensor:
    return cache[table].flatten(1, 2).transpose(1, 2)


def grouped(cache: Tensor, table: Tensor) -> Tensor:
    return gathered(cache, table).repeat_interleave(3, 1)


def visible(lens: Tensor, keys: int = 40) -> Tensor:
    return (torch.arange(keys) < lens[:, None])[:, None, None]


def sdpa(q: Tensor, key: Tensor, value: Tensor, lens: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, key, value, visible(lens), enable_gqa=True, **options)


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A model that must be left alone.

    Attributes:
        rule, word: the rule it breaks and a word in the reason.
        model: the model; args: its arguments.
        random: whether its result is random, so that only the graph can be compared.
    """

    rule: str
    word: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    random: bool = False


class NearMisses(list[NearMiss]):
    """A table of near misses; calling it gives a decorator that adds one."""

    def __call__(
        self, rule: str, word: str, *args: Any, random: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(model: Callable[..., Any]) -> Callable[..., Any]:
            self.append(NearMiss(rule, word, model, args or GIVEN.args, random))
            return model

        return add


def check_left_alone(case: NearMiss) -> None:
    """Nothing matches, the results are right, and the last reason is the right one."""
    adapted = run(case.model, *case.args, compare=not case.random)
    assert adapted.kinds == [], adapted.report
    assert [(r.rule, case.word in r.reason) for r in adapted.report.rejections][-1] == (case.rule, True), adapted.report
    assert set(adapted.rules) <= set(RULES)
