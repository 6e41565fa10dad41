"""A Llama whose KV cache is paged: separate K and V tensors per layer, filled and read through a block table."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from attention import Attention, Step, torch_attention


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; widths in elements."""

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections."""
        query, key = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return query, key, key


class Llama(nn.Module):
    """The model. ``prefill`` and ``decode`` are two functions so that each is compiled, and counted, on its own."""

    rope: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.attention: Attention = torch_attention
        self.page_size = 0

    def attach_caches(self, caches: list[tuple[Tensor, Tensor]]) -> None:
        """Give each layer its K and V cache ``[pages, page, KV heads, D]``, any strides."""
        for layer, (k_cache, v_cache) in zip(cast("list[Layer]", self.layers), caches, strict=True):
            # Buffers, since a graph treats them as static: no copy, and CUDA graphs may write to them.
            layer.attention.register_buffer("k_cache", k_cache, persistent=False)
            layer.attention.register_buffer("v_cache", v_cache, persistent=False)
        self.page_size = caches[0][0].shape[1]
        positions = torch.arange(self.config.max_positions, dtype=torch.float32, device=self.embedding.weight.device)
        self.register_buffer("rope", rotary_table(positions, self.config), persistent=False)

    def prefill(self, tokens: Tensor, block_table: Tensor) -> Tensor:
        """Run the prompt ``tokens [1, S]`` of one sequence with pages ``block_table [1, M]``.

        Returns:
            ``[1]``: the most likely next token.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        keys = torch.arange(block_table.shape[1] * self.page_size, device=tokens.device)
        seq_len = torch.full((1,), tokens.shape[1], dtype=torch.int32, device=tokens.device)
        step = Step(
            block_table=block_table,
            page=block_table[:, positions // self.page_size],
            offset=(positions % self.page_size)[None],
            seq_lens=seq_len,
            visible=keys <= positions[:, None],
            cu_seqlens_q=torch.cat([torch.zeros_like(seq_len), seq_len]),
        )
        return self._next_tokens(tokens, positions[None], step)

    def decode(self, tokens: Tensor, positions: Tensor, block_table: Tensor) -> Tensor:
        """Run one token of each sequence: ``tokens [B]`` at ``positions [B]``, with pages ``block_table [B, M]``.

        Returns:
            ``[B]``: the most likely next tokens.
        """
        keys = torch.arange(block_table.shape[1] * self.page_size, device=tokens.device)
        seq_lens = positions + 1
        step = Step(
            block_table=block_table,
            page=block_table.gather(1, (positions // self.page_size)[:, None]),
            offset=(positions % self.page_size)[:, None],
            seq_lens=seq_lens.int(),
            visible=(keys < seq_lens[:, None])[:, None, None],
            cu_seqlens_q=None,
        )
        return self._next_tokens(tokens[:, None], positions[:, None], step)

    def _next_tokens(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.rope[:, positions].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, step, self.attention)
        return self.head(self.norm(x[:, -1])).argmax(-1)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, step: Step, attention: Attention) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, step, attention)
        return x + self.mlp(self.mlp_norm(x))


class SelfAttention(nn.Module):
    """Query, key and value come from one projection, as views of its result."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = (config.num_q_heads, config.num_kv_heads)
        self.query_key_value = nn.Linear(config.width, sum(config.qkv_widths), bias=False)
        self.output = nn.Linear(config.num_q_heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, step: Step, attention: Attention) -> Tensor:
        num_q_heads, num_kv_heads = self.heads
        heads = self.query_key_value(x).unflatten(-1, (-1, self.head_dim))
        turned, value = heads.split([num_q_heads + num_kv_heads, num_kv_heads], dim=-2)
        query, key = rotate(turned, cos, sin).split([num_q_heads, num_kv_heads], dim=-2)
        return self.output(attention(query, key, value, self.k_cache, self.v_cache, step).flatten(-2))


class GatedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


def rotary_table(positions: Tensor, config: LlamaConfig) -> Tensor:
    """Cosines and sines ``[2, positions, D]`` in fp32.

    Source: RoFormer, arXiv:2104.09864, section 3.4.2.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = torch.outer(positions, 1.0 / config.rope_base**exponent).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs ``(i, i + D/2)`` of every head ``[B, S, H, D]`` by the angles of its position ``[B, S, D]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]
