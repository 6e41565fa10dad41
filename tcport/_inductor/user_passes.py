"""Inductor's slots for custom graph passes, which tcport's passes share with the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass


def shared_slot(
    slot: str, run: Callable[[torch.fx.Graph], None], identity: str, patches: dict[str, Any]
) -> CustomGraphPass:
    """What to put into a slot, so that tcport's passes run there and the user's own as well.

    Args:
        run: tcport's passes. identity: what stands for them in Inductor's cache key.
        patches: Inductor config entries; the user's passes for the slot are taken out of them.
    """
    return _Pipeline(run, identity, _user_passes(patches, slot), slot == _LAST_SLOT)


def anonymous_user_passes(patches: Mapping[str, Any]) -> list[str]:
    """Names of the user's own custom passes that have no identity, which makes Inductor skip its cache."""
    return [
        getattr(user_pass, "__name__", type(user_pass).__name__)
        for slot in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")
        for user_pass in _user_passes(dict(patches), slot)
        if not isinstance(user_pass, CustomGraphPass) or user_pass.uuid() is None
    ]


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
