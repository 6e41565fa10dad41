"""The same prompts through several backends of ``torch.compile``, with what each costs and yields."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import tcport
from display import Transcript, compiling
from kv_pool import Layout, PagePool, new_caches
from llama import Llama
from serving import MIN_BATCH, Request, Server, Throughput
from tokenizer import ChatTokenizer


@dataclasses.dataclass(frozen=True)
class Setup:
    """What stays the same from backend to backend."""

    model: Llama
    tokenizer: ChatTokenizer
    prompts: Sequence[str]
    prompt_ids: Sequence[list[int]]
    max_new_tokens: int
    max_batch: int
    page_size: int
    layout: Layout
    stop_ids: frozenset[int]
    console: Console

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    @property
    def table_width(self) -> int:
        """Pages of the longest sequence that can come about."""
        return -(-(max(map(len, self.prompt_ids)) + self.max_new_tokens) // self.page_size)


@dataclasses.dataclass
class Result:
    """What one backend made of the prompts."""

    backend: str
    prompts: Sequence[str]
    prompt_ids: Sequence[list[int]]
    generated: list[list[int]]
    texts: list[str]
    throughput: Throughput
    compilations: dict[str, int]
    compile_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The result as plain lists, dicts, strings and numbers."""
        requests = zip(self.prompts, self.prompt_ids, self.generated, self.texts, strict=True)
        return {
            "backend": self.backend,
            "prefill_tokens_per_second": self.throughput.prefill_rate,
            "decode_tokens_per_second": self.throughput.decode_rate,
            "compilations": self.compilations,
            "compile_seconds": self.compile_seconds,
            "requests": [
                {"prompt": prompt, "prompt_ids": ids, "ids": generated, "text": text}
                for prompt, ids, generated, text in requests
            ],
        }


class CountedStep:
    """A step of the model, compiled, that counts how often."""

    def __init__(self, step: Callable[..., Tensor], backend: str) -> None:
        self._step = compiled(step, backend)
        self.compilations = 0
        self.compile_seconds = 0.0

    def __call__(self, *args: Tensor) -> Tensor:
        before, start = tcport.compile_count(), time.perf_counter()
        result = self._step(*args)
        if tcport.compile_count() > before:
            self.compilations += tcport.compile_count() - before
            self.compile_seconds += time.perf_counter() - start
        return result


def compiled(step: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """``step`` under a backend, one graph for every batch size and prompt length."""
    if backend == "eager":
        return step
    known: Any = backend
    if backend == "tcport" and backend not in torch.compiler.list_backends():
        # A bare checkout on the Python path has no entry points; the backend is a plain function all the same.
        from tcport.backend import tcport as known
    return torch.compile(step, backend=known, fullgraph=True, dynamic=True)


def compare(setup: Setup, backends: Sequence[str]) -> list[Result]:
    """Serve all prompts once under each backend."""
    attach_caches(setup)
    return [serve(setup, backend) for backend in backends]


def attach_caches(setup: Setup) -> None:
    """Give the model caches in which ``max_batch`` of the longest sequences have room."""
    config = setup.model.config
    caches = new_caches(
        config.num_layers,
        num_pages(setup),
        setup.page_size,
        config.num_kv_heads,
        config.head_dim,
        layout=setup.layout,
        device=setup.device,
        dtype=setup.model.embedding.weight.dtype,
    )
    setup.model.attach_caches(caches)


def num_pages(setup: Setup) -> int:
    return 1 + setup.max_batch * setup.table_width


def serve(setup: Setup, backend: str) -> Result:
    """Compile the two steps, then time them over all prompts."""
    prefill, decode = CountedStep(setup.model.prefill, backend), CountedStep(setup.model.decode, backend)
    with compiling(setup.console, backend) as running, torch.no_grad():
        for name, step in {"prefill": prefill, "decode": decode}.items():
            with running(name):
                step(*sample_arguments(setup)[name])
    server = Server(
        prefill,
        decode,
        PagePool(num_pages(setup), setup.page_size),
        table_width=setup.table_width,
        max_batch=setup.max_batch,
        stop_ids=setup.stop_ids,
        device=setup.device,
    )
    requests = [Request(ids, setup.max_new_tokens) for ids in setup.prompt_ids]
    with Transcript(setup.console, backend, setup.prompts, setup.tokenizer.decode) as transcript:
        server.run(requests, transcript.add)
    return Result(
        backend=backend,
        prompts=setup.prompts,
        prompt_ids=setup.prompt_ids,
        generated=[request.generated for request in requests],
        texts=[setup.tokenizer.decode(request.generated) for request in requests],
        throughput=server.throughput,
        compilations={"prefill": prefill.compilations, "decode": decode.compilations},
        compile_seconds=prefill.compile_seconds + decode.compile_seconds,
    )


def sample_arguments(setup: Setup) -> dict[str, tuple[Tensor, ...]]:
    """Arguments to compile with; everything is written to the scratch page."""
    # Equal sizes are taken for one size when a graph is captured: a batch as wide as the block table would tie the two.
    batch = MIN_BATCH + (setup.table_width == MIN_BATCH)
    prompt = torch.tensor([setup.prompt_ids[0]], device=setup.device)
    tokens, positions = (torch.zeros(batch, dtype=torch.int64, device=setup.device) for _ in range(2))
    # Tensors of their own, as in serving: a graph captured with a view is tied to there being a base.
    one, several = (torch.zeros(rows, setup.table_width, dtype=torch.int32, device=setup.device) for rows in (1, batch))
    return {"prefill": (prompt, one), "decode": (tokens, positions, several)}


def explain(setup: Setup) -> dict[str, str]:
    """tcport's report on each step, which is compiled once more: a cached graph has nothing to report."""
    steps, reports = {"prefill": setup.model.prefill, "decode": setup.model.decode}, {}
    with compiling(setup.console, "explain") as running, torch.no_grad():
        for name, arguments in sample_arguments(setup).items():
            with running(name):
                reports[name] = str(tcport.explain(steps[name], *arguments, explain_dynamic=True))
    return reports
