"""What a piece costs a transformer, from the model's shape: matrix products of one forward pass.

In:   widths and counts, as in the model's configuration
Out:  ``AttentionCost``: a cost per token and one per query-key pair, as whole numbers

Operations per layer (a multiply-add is two), with d = ``head_dim``:

- per token: 4 * hidden * heads * d (query and output projections), 4 * hidden * kv_heads * d (keys, values),
  2 * ffn_matrices * hidden * ffn (MLP);
- per pair: 4 * heads * d (scores, and their product with the values);

and 2 * hidden * vocab per token once, for the output layer. This is the count of Narayanan et al. 2021
("Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", appendix), with the terms
that grouped-query attention and gated MLPs change. The backward pass costs twice the forward pass in every
term, so that it changes no ratio.
"""

from dataclasses import Field, dataclass, fields
from math import gcd
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringfeed.sharding.piece_cost import causal_pairs

__all__ = ["AttentionCost"]

Int64 = NDArray[np.int64]

_Whole = TypeVar("_Whole", int, NDArray[np.int64])

_LARGEST_COST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCost:
    """Cost of a piece by a model's shape.

    Raises:
        ValueError: if a size is below 1, or sizes do not go together; names the way out.
    """

    hidden: int
    heads: int
    """Query heads."""
    layers: int
    ffn: int
    """Width of the MLP; of a mixture of experts, experts per token times their width."""
    causal: bool = True
    """Whether a token attends only to those before it, and itself."""
    window: int | None = None
    """Keys that a token attends to at most, itself counted; None: all. Needs ``causal``."""
    window_layers: int | None = None
    """Layers that ``window`` holds for; by default all."""
    kv_heads: int | None = None
    """Key and value heads; by default as many as ``heads``."""
    head_dim: int | None = None
    """Width of a head; by default hidden / heads."""
    ffn_matrices: int = 3
    """Matrices of the MLP: 3 where it is gated (SwiGLU), else 2."""
    vocab: int = 0
    """Rows of the output layer; 0 leaves it out."""

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "layers", "ffn", "ffn_matrices"):
            self._check_least(name, 1)
        self._check_least("vocab", 0)
        for name in ("window", "kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                self._check_least(name, 1)
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal must be true or false, got {self.causal!r}")  # noqa: TRY004
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; give head_dim")
        if self.window is not None and not self.causal:
            raise ValueError(
                f"window={self.window} needs causal attention; leave out window, or causal=false"
            )
        self._check_window_layers()

    @property
    def name(self) -> str:
        """Return the specification that makes this model again: every field that is not its default."""
        shown = ((field.name, getattr(self, field.name)) for field in fields(self) if self._is_set(field))
        return "attention:" + ",".join(f"{name}={value}".lower() for name, value in shown)

    @property
    def flops_per_unit(self) -> int:
        """Return the operations of one unit of cost: the largest number that divides all of them."""
        return gcd(self._token_flops, self._pair_flops)

    @property
    def per_token(self) -> int:
        """Return units per token."""
        return self._token_flops // self.flops_per_unit

    @property
    def per_pair(self) -> int:
        """Return units per query-key pair of one layer."""
        return self._pair_flops // self.flops_per_unit

    def piece_costs(self, lengths: Int64) -> Int64:
        """Return the cost of each piece in units: real lengths int64 [P] -> int64 [P].

        Raises:
            ValueError: if a piece costs more than int64 holds.
        """
        longest = int(lengths.max(initial=0))
        # As Python integers, which do not wrap around.
        if self._cost(longest, min(longest, self.window or longest)) > _LARGEST_COST:
            raise ValueError(
                f"cost_model={self.name!r} makes a piece of {longest} tokens cost more than int64 holds"
            )
        return self._cost(lengths, lengths if self.window is None else np.minimum(lengths, self.window))

    def _cost(self, length: _Whole, within: _Whole) -> _Whole:
        """Return the units of a piece, ``within`` tokens of which see all before them."""
        windowed = self._window_layers
        pairs = (self.layers - windowed) * self._all_pairs(length)
        if windowed:
            pairs += windowed * (self._all_pairs(within) + (length - within) * within)
        return self.per_token * length + self.per_pair * pairs

    def _all_pairs(self, length: _Whole) -> _Whole:
        return causal_pairs(length) if self.causal else length * length

    @property
    def _window_layers(self) -> int:
        if self.window is None:
            return 0
        return self.layers if self.window_layers is None else self.window_layers

    @property
    def _head_width(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def _token_flops(self) -> int:
        """Operations per token of all layers and the output layer."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        projections = 4 * self.hidden * self._head_width * (self.heads + kv_heads)
        mlp = 2 * self.ffn_matrices * self.hidden * self.ffn
        return self.layers * (projections + mlp) + 2 * self.hidden * self.vocab

    @property
    def _pair_flops(self) -> int:
        """Operations per pair of one layer."""
        return 4 * self.heads * self._head_width

    def _is_set(self, field: Field[Any]) -> bool:
        return bool(getattr(self, field.name) != field.default)

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    def _check_window_layers(self) -> None:
        if self.window_layers is None:
            return
        if self.window is None:
            raise ValueError(f"window_layers={self.window_layers} has nothing to do; give window, too")
        self._check_least("window_layers", 1)
        if self.window_layers > self.layers:
            raise ValueError(f"window_layers={self.window_layers} is more than layers={self.layers}")
