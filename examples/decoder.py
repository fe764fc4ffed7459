"""A small decoder over one rank's tokens, with attention of your choice. Put your model in its place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB_SIZE = 259  # of ringfeed's byte tokenizer
NUM_HEADS, NUM_KV_HEADS, HEAD_WIDTH, WIDTH, NUM_LAYERS = 4, 2, 16, 64, 2


class Decoder(nn.Module):
    """Everything but attention looks at one token at a time, so it need not know how tokens were cut."""

    def __init__(self, make_attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer(make_attention()) for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """Return logits [L, V] of tokens [L] at positions [L] of their documents."""
        # From position_ids, never from places in the batch: a rank's tokens are no plain sequence.
        exponents = torch.arange(0, HEAD_WIDTH, 2, device=position_ids.device) / HEAD_WIDTH
        angles = position_ids[:, None, None] * 10_000.0**-exponents
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), **attention)
        return self.head(self.norm(x))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.self_attn = SelfAttention(attention)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, **attention: Any) -> Tensor:
        x = x + self.self_attn(x, cos, sin, **attention)
        return x + self.mlp(x)


class SelfAttention(nn.Module):
    """Projections around ``attn_module``: the name under which TransformerEngine's is looked for."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn_module = attention
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(NUM_HEADS * HEAD_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, **attention: Any) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(1, (-1, HEAD_WIDTH))
        q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        attended = self.attn_module(_rotate(q, cos, sin), _rotate(k, cos, sin), v, **attention)
        return self.out(attended.flatten(1))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(x)
