"""A small decoder for the demo: real attention and positions, sized for a CPU.

In:   one rank's tokens and positions [L], and a function that attends
Out:  logits [L, V], and the sum of the token losses

The decoder does not know how its tokens were cut: who may see whom is inside the function that
attends, so sharded and unsharded runs share every other line.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Attend", "DecoderConfig", "TinyDecoder", "attend_per_document", "token_loss_sum"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [L, H, D], k and v [L, Hkv, D] -> [L, H, D]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of the decoder."""

    vocab_size: int
    width: int = 32
    num_layers: int = 2
    num_heads: int = 1
    num_kv_heads: int = 1
    head_width: int = 16
    seed: int = 0
    """Of the initial weights: the same on every rank."""


class TinyDecoder(nn.Module):
    """Pre-norm decoder with rotary positions and grouped-query attention."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        torch.manual_seed(config.seed)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._head_width = config.head_width

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Return logits float32 [L, V] for ``input_ids`` and ``position_ids`` int64 [L]."""
        turns = _rotary_turns(position_ids, self._head_width)
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, turns, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Layer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, head_width = config.width, config.head_width
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._head_width = head_width
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self._heads) * head_width, bias=False)
        self.out = nn.Linear(config.num_heads * head_width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(1, (sum(self._heads), self._head_width))
        q, k, v = heads.split(self._heads, dim=1)
        x = x + self.out(attend(_rotate(q, turns), _rotate(k, turns), v).flatten(1))
        y: Tensor = x + self.mlp(x)
        return y


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropies of logits [L, V] where labels [L] are not -100."""
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def attend_per_document(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, cu_seqlens_padded: Tensor
) -> Tensor:
    """Attend in one document after the other, on one rank that holds them all.

    The unsharded run's attention: nothing is gathered, blocked or masked by document.
    """
    parts = []
    real, slots = cu_seqlens.tolist(), cu_seqlens_padded.tolist()
    for slot in range(len(real) - 1):
        length = real[slot + 1] - real[slot]
        if length:
            rows = slice(slots[slot], slots[slot] + length)
            heads = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
            attended = nn.functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True
            )
            parts.append(attended[0].transpose(0, 1))
        parts.append(q.new_zeros(slots[slot + 1] - slots[slot] - length, *q.shape[1:]))
    return torch.cat(parts)


def _rotary_turns(position_ids: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 [L, 1, head_width / 2]."""
    exponents = torch.arange(0, head_width, 2, device=position_ids.device) / head_width
    angles = position_ids[:, None, None].float() * 10_000.0**-exponents
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair of x [L, heads, D] by its token's angles."""
    cosines, sines = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
