"""The serving loop of the example on a small random Llama; transformers' own generation says which tokens are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rich.console import Console

import tcport
from attention import SPELLINGS
from compare import Setup, compare
from kv_pool import SCRATCH_PAGE, PagePool, new_caches
from llama import Llama, LlamaConfig
from serving import Request, Server

CONFIG = LlamaConfig(
    vocab_size=101, width=48, mlp_width=80, num_layers=2, num_q_heads=6, num_kv_heads=2, head_dim=16, max_positions=256
)
PROMPT_LENGTHS = [3, 17, 1, 8, 30, 4]


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(1)
    llama = Llama(CONFIG).requires_grad_(False).eval()
    for parameter in llama.parameters():
        # Spread enough for the most likely token to lead by far more than rounding.
        if parameter.dim() == 2:
            parameter.normal_(0, 0.25)
    return llama


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(101, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def expected(model: Llama, prompts: list[list[int]]) -> list[list[int]]:
    """Twenty greedy tokens of each prompt, from transformers' LlamaForCausalLM with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.width,
        intermediate_size=CONFIG.mlp_width,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_q_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        rope_theta=CONFIG.rope_base,
        rms_norm_eps=CONFIG.norm_eps,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    oracle = transformers.LlamaForCausalLM(config).eval()
    oracle.load_state_dict(as_transformers(model), strict=True)
    return [greedy(oracle, prompt, 20) for prompt in prompts]


def as_transformers(model: Llama) -> dict[str, torch.Tensor]:
    """The weights under transformers' names."""
    state = model.state_dict()
    renamed = {
        "model.embed_tokens.weight": state["embedding.weight"],
        "model.norm.weight": state["norm.weight"],
        "lm_head.weight": state["head.weight"],
    }
    for layer in range(CONFIG.num_layers):
        own, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        qkv = state[own + "attention.query_key_value.weight"].split(CONFIG.qkv_widths)
        renamed |= {f"{theirs}self_attn.{n}_proj.weight": w for n, w in zip("qkv", qkv, strict=True)}
        gate, up = state[own + "mlp.gate_up.weight"].chunk(2)
        renamed |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
        renamed[theirs + "mlp.down_proj.weight"] = state[own + "mlp.down.weight"]
        renamed[theirs + "self_attn.o_proj.weight"] = state[own + "attention.output.weight"]
        renamed[theirs + "input_layernorm.weight"] = state[own + "attention_norm.weight"]
        renamed[theirs + "post_attention_layernorm.weight"] = state[own + "mlp_norm.weight"]
    return renamed


@torch.no_grad()
def greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, oracle(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


def server(
    model: Llama,
    *,
    spelling: str = "torch",
    layout: Any = "page-major",
    page_size: int = 4,
    num_pages: int = 65,
    max_batch: int = 4,
    stop_ids: frozenset[int] = frozenset(),
    compile_with: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step,
) -> Server:
    """A server over fresh caches of the model."""
    c = CONFIG
    model.attention = SPELLINGS[spelling]
    model.attach_caches(new_caches(c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, layout=layout))
    return Server(
        compile_with(model.prefill),
        compile_with(model.decode),
        PagePool(num_pages, page_size),
        table_width=-(-80 // page_size),
        max_batch=max_batch,
        stop_ids=stop_ids,
    )


def generate(serving: Server, prompts: Sequence[list[int]], count: int = 20) -> list[list[int]]:
    requests = [Request(prompt, count) for prompt in prompts]
    serving.run(requests)
    return [request.generated for request in requests]


@pytest.mark.parametrize("layout", ["page-major", "head-major"])
@pytest.mark.parametrize("spelling", ["torch", "canonical"])
@pytest.mark.parametrize(("page_size", "max_batch"), [(4, 4), (1, 3), (16, 1), (5, 6)])
def test_tokens(
    model: Llama,
    prompts: list[list[int]],
    expected: list[list[int]],
    layout: str,
    spelling: str,
    page_size: int,
    max_batch: int,
) -> None:
    num_pages = 1 + max_batch * -(-50 // page_size)
    serving = server(
        model, layout=layout, spelling=spelling, page_size=page_size, max_batch=max_batch, num_pages=num_pages
    )
    assert generate(serving, prompts) == expected
    assert serving.pool.num_free == num_pages - 1


@pytest.mark.parametrize(
    ("backend", "spelling", "layout"),
    [
        ("inductor", "torch", "page-major"),
        ("tcport", "torch", "page-major"),
        ("tcport", "torch", "head-major"),
        ("tcport", "canonical", "page-major"),
        ("tcport", "canonical", "head-major"),
    ],
)
def test_tokens_compiled(
    model: Llama, prompts: list[list[int]], expected: list[list[int]], backend: str, spelling: str, layout: str
) -> None:
    def compile_with(step: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(step, backend=backend, fullgraph=True, dynamic=True)

    serving = server(model, layout=layout, spelling=spelling, compile_with=compile_with)
    assert generate(serving, prompts) == expected


class Counting:
    """Compiles a step with a backend that runs the graph as it is, and counts the graphs of each step."""

    def __init__(self) -> None:
        self.graphs: dict[str, int] = {}

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        name = step.__name__
        self.graphs[name] = 0

        def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            self.graphs[name] += 1
            return gm.forward

        return torch.compile(step, backend=backend, fullgraph=True, dynamic=True)


@pytest.mark.parametrize("spelling", ["torch", "canonical"])
def test_one_graph_serves_every_batch_size(model: Llama, spelling: str) -> None:
    """200 decode steps with 2, 3, 5, 4 and 1 sequences, and prompts of 15 lengths."""
    counting = Counting()
    serving = server(model, spelling=spelling, max_batch=5, num_pages=101, compile_with=counting)
    batches = []
    decode = serving.decode

    def recording(*args: torch.Tensor) -> torch.Tensor:
        batches.append(len(args[0]))
        return decode(*args)

    serving.decode = recording
    for count in (2, 3, 5, 4, 1):
        generate(serving, [[7] * (2 + 3 * count + i) for i in range(count)], count=41)
    assert batches == [2] * 40 + [3] * 40 + [5] * 40 + [4] * 40 + [2] * 40  # one sequence is padded to two rows
    assert counting.graphs == {"prefill": 1, "decode": 1}


@pytest.mark.parametrize("spelling", ["torch", "canonical"])
def test_the_compile_count_a_reader_sees(model: Llama, prompts: list[list[int]], spelling: str) -> None:
    counting = Counting()
    before = tcport.compile_count()
    generate(server(model, spelling=spelling, compile_with=counting), prompts)
    # One of the prompts is a single token, and the size 1 gets a graph of its own.
    assert counting.graphs == {"prefill": 2, "decode": 1}
    assert tcport.compile_count() - before == 3


class Numbers:
    """Stands in for a tokenizer where nobody reads the text."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("page_size", [4, 16, 32])  # with pages of 32 the table is as wide as the smallest batch
def test_nothing_is_compiled_once_serving_begins(
    model: Llama, prompts: list[list[int]], expected: list[list[int]], page_size: int
) -> None:
    """What is compiled before the first request serves all of them: the steps are captured as they are called later."""
    model.attention = SPELLINGS["torch"]
    longer = [prompt for prompt in prompts if len(prompt) > 1]
    setup = Setup(
        model=model,
        tokenizer=Numbers(),  # type: ignore[arg-type]
        prompts=[str(len(prompt)) for prompt in longer],
        prompt_ids=longer,
        max_new_tokens=20,
        max_batch=4,
        page_size=page_size,
        layout="page-major",
        stop_ids=frozenset(),
        console=Console(quiet=True),
    )
    (result,) = compare(setup, ["aot_eager"])
    assert result.compilations == {"prefill": 1, "decode": 1}
    assert result.generated == [tokens for prompt, tokens in zip(prompts, expected, strict=True) if len(prompt) > 1]


@pytest.mark.parametrize("spelling", ["torch", "canonical"])
def test_padding_touches_no_page_but_the_scratch_page(model: Llama, spelling: str) -> None:
    serving = server(model, spelling=spelling, num_pages=33)
    caches = [cache for layer in model.layers for cache in (layer.attention.k_cache, layer.attention.v_cache)]
    for cache in caches:
        cache.fill_(3.25)
    # The pages a lone sequence of 10 tokens in pages of 4 takes: the first three the pool hands out.
    own = serving.pool.allocate(3)
    serving.pool.free(own)
    generate(serving, [[5, 6, 7, 8, 9]], count=5)
    for cache in caches:
        untouched = [page for page in range(33) if page not in (*own, SCRATCH_PAGE)]
        assert (cache[untouched] == 3.25).all()
        written = cache.flatten(2)[sorted(own, key=own.index)].ne(3.25).any(-1).flatten()
        assert written.sum() == 9  # five of the prompt and four of the answer; the last token is never run


def test_a_full_pool_makes_requests_wait(model: Llama, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Room for the longest request alone: 30 + 20 tokens in pages of 4."""
    serving = server(model, num_pages=1 + 13, max_batch=6)
    assert generate(serving, prompts) == expected


def test_a_stop_token_ends_a_sequence(model: Llama, prompts: list[list[int]], expected: list[list[int]]) -> None:
    stop = expected[4][6]
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected]
    assert min(map(len, cut)) < 20
    assert generate(server(model, stop_ids=frozenset({stop})), prompts) == cut


def test_tokens_are_handed_out_as_they_come(model: Llama, prompts: list[list[int]]) -> None:
    serving = server(model)
    requests = [Request(prompt, 6) for prompt in prompts]
    heard: dict[int, list[int]] = {}
    serving.run(requests, lambda index, token: heard.setdefault(index, []).append(token))
    assert heard == {index: request.generated for index, request in enumerate(requests)}
    assert serving.throughput.prefill_tokens == sum(PROMPT_LENGTHS)
    assert serving.throughput.decode_tokens == 5 * len(prompts)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "a prompt of one token at least"),
        (Request([1], 0), "room for one new token"),
        (Request([1] * 80, 1), "needs 21 pages; a block table has 20 columns"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(model: Llama, request_: Request, message: str) -> None:
    serving = server(model)
    with pytest.raises(ValueError, match=message):
        serving.run([Request([1, 2], 3), request_])
    assert serving.pool.num_free == 64
