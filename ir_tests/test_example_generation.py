"""The example with its real weights: greedy tokens are those of transformers' own Llama from the same GGUF file."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenizer import ChatTokenizer
from weights import GGUFFile, bundled_gguf

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 64
STORY = (
    "A fox lived at the edge of a wood, beside a stream that froze in winter and sang in spring. Every morning it "
    "walked the same path, past the mill, past the three old oaks, and down to the bridge, where it waited for the "
    "sun."
)
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List the first five prime numbers.",
    "Give me three names for a cat that is afraid of mice, and say why each of them fits.",
    "Hi",
    " ".join(["Where does the fox go every morning?", STORY, STORY]),
    " ".join(["Continue this story:", STORY, STORY, STORY]),
]


@pytest.fixture(scope="module")
def prompt_ids() -> list[list[int]]:
    tokenizer = ChatTokenizer(GGUFFile(bundled_gguf()))
    return [tokenizer.encode_chat(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def transformers_tokens(prompt_ids: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """Greedy tokens from transformers on a device."""
    return functools.cache(lambda device: _transformers_tokens(prompt_ids, device))


def _transformers_tokens(prompt_ids: list[list[int]], device: str) -> list[list[int]]:
    """Eager, in fp32; the prompts in one batch, padded on the left."""
    import transformers

    path = bundled_gguf()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval().to(device).generation_config.eos_token_id = None
    width = max(map(len, prompt_ids))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompt_ids], device=device)
    attended = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    with torch.no_grad():
        generated = model.generate(
            padded, attention_mask=attended, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
    return generated[:, width:].tolist()


def run_example(directory: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that a run of the script writes."""
    prompts, output = directory / "prompts.txt", directory / "run.json"
    prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    script = [sys.executable, str(ROOT / "examples" / "generate.py"), "--prompts", str(prompts), "--json", str(output)]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*script, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor", "tcport"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_backend_generates_the_tokens_of_transformers(
    prompt_ids: list[list[int]],
    transformers_tokens: Callable[[str], list[list[int]]],
    device: str,
    backend: str,
    tmp_path: Path,
) -> None:
    """A test for each backend, so that several processes can share the minutes that their compilers take."""
    assert max(map(len, prompt_ids)) > 10 * 16, "a prompt must fill several pages"
    arguments = {"backend": backend, "device": device, "dtype": "float32", "max-new-tokens": str(NEW_TOKENS)}
    run = run_example(tmp_path, "--ignore-stop", *(f"--{name}={value}" for name, value in arguments.items()))
    (result,) = run["results"]
    assert result["backend"] == backend
    requests = result["requests"]
    assert [request["prompt"] for request in requests] == PROMPTS
    assert [request["prompt_ids"] for request in requests] == prompt_ids
    assert [request["ids"] for request in requests] == transformers_tokens(device)
    assert result["compilations"] == dict.fromkeys(("prefill", "decode"), 0 if backend == "eager" else 1)
    assert result["decode_tokens_per_second"] > 0


def test_the_tokenizer_is_that_of_the_file() -> None:
    """transformers reads the same tables; digits, accents, white space and control tokens are where readers differ."""
    import transformers

    path = bundled_gguf()
    oracle = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = ChatTokenizer(GGUFFile(path))
    for text in [*PROMPTS, "", "12345 and 6.7e-8", " naïve\tcafé  日本 🦊\n\n", "<|im_end|> is a control token"]:
        messages = [{"role": "user", "content": text}]
        chat = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = oracle(chat, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode_chat(text) == ids, text
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
    assert tokenizer.stop_ids == {0, 2}
