"""What computes a rank's attention once all keys are there: a kernel for each kind of device.

In:   q of the rank, k and v of the chunk, an ``AllGatherContext`` (``chunk_context.py``)
Out:  the rank's attention output

``SdpaBlocks`` (``block_attention.py``) runs and trains anywhere. ``FlexBlocks`` (``flex_blocks.py``) keeps no
mask token by token, and trains where FlexAttention has a backward pass. ``kernel_for`` (``allgather.py``)
chooses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ringfeed.sharding.attention.chunk_context import AllGatherContext

__all__ = ["AttentionKernel"]


class AttentionKernel(Protocol):
    """Attends from L local rows to the chunk's T keys. A frozen, hashable object without state."""

    name: ClassVar[str]

    def obstacle(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Return why the kernel cannot attend to such tensors, forward and backward; None: it can."""
        ...

    def mask(self, context: AllGatherContext) -> Any:
        """Return the context's mask as this kernel wants it, on the context's device.

        Made once for a chunk and a window, and used by all layers that have it.
        """
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Any, scale: float | None) -> Tensor:
        """Return [L, H, Dv]; rows that see no key are zero and give no gradient.

        Args:
            q: [L, H, D].
            k: [T, Hkv, D] in chunk order, Hkv divides H.
            v: [T, Hkv, Dv] in chunk order.
            mask: what ``mask`` made.
            scale: factor on the scores; None is 1/sqrt(D).
        """
        ...
