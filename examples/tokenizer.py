"""The tokenizer and the chat template that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from weights import GGUFFile

CONTROL_TOKEN = 3
"""GGUF's token type of ``<|im_start|>`` and its like, which text never spells."""


class ChatTokenizer:
    """Byte-level BPE with a chat template."""

    def __init__(self, file: GGUFFile) -> None:
        kind = file.metadata("tokenizer.ggml.model"), file.metadata("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"{file.path} has a tokenizer of kind {kind}; the example reads ('gpt2', 'smollm').")
        tokens = file.metadata("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in file.metadata("tokenizer.ggml.merges")]
        bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        self._tokenizer = Tokenizer(bpe)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        types = file.metadata("tokenizer.ggml.token_type")
        control = [AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
        self._tokenizer.add_special_tokens(control)
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
            file.metadata("tokenizer.chat_template")
        )
        self.stop_ids = {file.metadata("tokenizer.ggml.eos_token_id"), self._tokenizer.token_to_id("<|endoftext|>")}

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of one user message, up to where the assistant's answer begins."""
        messages = [{"role": "user", "content": prompt}]
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated ids, control tokens left out."""
        return self._tokenizer.decode(list(ids))
