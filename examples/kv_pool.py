"""The pages of a KV cache: who owns which, and the tensors they lie in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Layout = Literal["page-major", "head-major"]

SCRATCH_PAGE = 0
"""Never handed out: rows that only pad a batch write here, so that they cannot touch a page in use."""


class PagePool:
    """Hands out page ids and takes them back; knows nothing of what is in them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"A pool needs a scratch page and one more, of one token at least; got {num_pages} pages.")
        self.num_pages = num_pages
        self.page_size = page_size
        # The page freed last is handed out first: its lines are the likeliest to be cached still.
        self._free = [page for page in reversed(range(num_pages)) if page != SCRATCH_PAGE]
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages; all or none."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages were asked for and {len(self._free)} of {self.num_pages} are free.")
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back. A page that is not in use is an error: someone else may own it by now."""
        unowned = [page for page in pages if page not in self._used]
        if unowned or len(set(pages)) < len(pages):
            raise ValueError(f"Pages {unowned or pages} were given back twice or never handed out.")
        self._used.difference_update(pages)
        self._free.extend(pages)


def new_caches(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    layout: Layout = "page-major",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[tuple[Tensor, Tensor]]:
    """K and V of every layer, each a tensor of its own of logical shape ``[pages, page, KV heads, D]``.

    ``page-major`` keeps the heads of one token together, ``head-major`` the tokens of one head of a page. They start
    as zeros: a mask multiplies what it hides by 0, which does not silence a NaN.
    """

    def cache() -> Tensor:
        if layout == "page-major":
            return torch.zeros(num_pages, page_size, num_kv_heads, head_dim, device=device, dtype=dtype)
        return torch.zeros(num_pages, num_kv_heads, page_size, head_dim, device=device, dtype=dtype).transpose(1, 2)

    return [(cache(), cache()) for _ in range(num_layers)]
