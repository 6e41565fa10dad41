"""Continuous batching: requests join and leave while the others go on decoding."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kv_pool import SCRATCH_PAGE, PagePool

Prefill = Callable[[Tensor, Tensor], Tensor]
"""``(tokens [1, S], block_table [1, M]) -> next token [1]``"""

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(tokens [B], positions [B], block_table [B, M]) -> next tokens [B]``"""

MIN_BATCH = 2
"""A batch of one is padded to two rows. ``torch.compile`` bakes the size 1 into a graph as a constant, so a real batch
of one would cost a second compilation, in the middle of serving; the second row costs next to nothing."""


@dataclasses.dataclass
class Request:
    """One prompt, and what has become of it."""

    prompt: list[int]
    max_new_tokens: int
    generated: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def max_tokens(self) -> int:
        return len(self.prompt) + self.max_new_tokens


@dataclasses.dataclass
class Throughput:
    """Tokens and seconds of each phase. A prompt's first new token is counted to its prefill."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Server:
    """Runs requests through a prefill and a decode step.

    Args:
        prefill, decode: the two steps, compiled or not; both return the most likely tokens.
        pool: owns the pages of the model's caches.
        table_width: columns of every block table, the same for all steps so that no graph sees it change.
        max_batch: sequences decoded together.
        stop_ids: tokens that end a sequence; the token itself is kept.
    """

    def __init__(
        self,
        prefill: Prefill,
        decode: Decode,
        pool: PagePool,
        *,
        table_width: int,
        max_batch: int,
        stop_ids: frozenset[int] = frozenset(),
        device: torch.device | str = "cpu",
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.pool = pool
        self.table_width = table_width
        self.max_batch = max_batch
        self.stop_ids = stop_ids
        self.device = torch.device(device)
        self.throughput = Throughput()

    def run(
        self, requests: Sequence[Request], on_token: Callable[[int, int], None] = lambda index, token: None
    ) -> None:
        """Serve until every request is done; ``on_token(index of the request, token)`` is called as tokens come."""
        for request in requests:
            self._check(request)
        waiting = deque(enumerate(requests))
        running: list[tuple[int, Request]] = []
        while waiting or running:
            while waiting and len(running) < self.max_batch and self._fits(waiting[0][1]):
                index, request = waiting.popleft()
                on_token(index, self._start(request))
                running.append((index, request))
            running = self._retire(running)
            if running:
                for (index, _), token in zip(running, self._step([r for _, r in running]), strict=True):
                    on_token(index, token)
                running = self._retire(running)

    def _check(self, request: Request) -> None:
        pages = self.pool.pages_for(request.max_tokens)
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError("A request needs a prompt of one token at least and room for one new token.")
        if pages > self.table_width or pages >= self.pool.num_pages:
            raise ValueError(
                f"A request of up to {request.max_tokens} tokens needs {pages} pages; a block table has "
                f"{self.table_width} columns and the pool {self.pool.num_pages - 1} pages."
            )

    def _fits(self, request: Request) -> bool:
        return self.pool.pages_for(request.max_tokens) <= self.pool.num_free

    @torch.no_grad()
    def _start(self, request: Request) -> int:
        """Admit a request: take every page it can come to need, so that a running one never waits for a page."""
        request.pages = self.pool.allocate(self.pool.pages_for(request.max_tokens))
        start = time.perf_counter()
        tokens = torch.tensor([request.prompt], device=self.device)
        token = int(self.prefill(tokens, self._tables([request.pages])))
        self.throughput.prefill_seconds += time.perf_counter() - start
        self.throughput.prefill_tokens += len(request.prompt)
        request.generated.append(token)
        return token

    @torch.no_grad()
    def _step(self, running: list[Request]) -> list[int]:
        """Decode one token of every running request."""
        start = time.perf_counter()
        padding = max(MIN_BATCH - len(running), 0)
        tokens = [r.generated[-1] for r in running] + [0] * padding
        # The newest token is not in the cache yet; it goes right behind what is.
        positions = [len(r.prompt) + len(r.generated) - 1 for r in running] + [0] * padding
        tables = self._tables([r.pages for r in running] + [[]] * padding)
        following = self.decode(
            torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device), tables
        ).tolist()[: len(running)]
        self.throughput.decode_seconds += time.perf_counter() - start
        self.throughput.decode_tokens += len(running)
        for request, token in zip(running, following, strict=True):
            request.generated.append(token)
        return following

    def _retire(self, running: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Drop the requests that are done and give their pages back."""
        going_on = []
        for index, request in running:
            if len(request.generated) == request.max_new_tokens or request.generated[-1] in self.stop_ids:
                self.pool.free(request.pages)
                request.pages = []
            else:
                going_on.append((index, request))
        return going_on

    def _tables(self, rows: list[list[int]]) -> Tensor:
        """``[B, table width]`` int32; a row is filled up with the scratch page."""
        padded = [pages + [SCRATCH_PAGE] * (self.table_width - len(pages)) for pages in rows]
        return torch.tensor(padded, dtype=torch.int32, device=self.device)
