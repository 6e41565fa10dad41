"""Inductor's configuration: the names of its entries, and what the modes of ``torch.compile`` set."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config


def mode_patches(mode: str) -> dict[str, Any]:
    """The Inductor config entries behind a ``torch.compile`` mode."""
    return {} if mode == "default" else dict(torch._inductor.list_mode_options(mode))  # type: ignore[arg-type]


def config_names() -> list[str]:
    """The names of Inductor's config entries, those included that stand for an entry of another module."""
    return list(config._config)  # pyright: ignore[reportAttributeAccessIssue]
