"""The mask of a chunk's documents as FlexAttention wants it: a function of a query's and a key's index.

In:   an ``AllGatherContext`` (``allgather.py``)
Out:  a ``mask_mod`` for ``create_block_mask``, from L local queries to T keys in chunk order

Any layout and index map will do, because a local query brings its own document and position.
"""

from collections.abc import Callable

from torch import Tensor

from ringfeed.sharding.attention.allgather import AllGatherContext

__all__ = ["MaskMod", "document_mask_mod"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, q_idx, kv_idx) -> bool, as FlexAttention calls it."""


def document_mask_mod(context: AllGatherContext) -> MaskMod:
    """Return the mask: a token sees its own document up to itself; padding sees nothing and is not seen.

    Args:
        context: on the device where the mask is used.
    """
    documents, positions = context.local_document_ids, context.local_positions
    key_documents, key_positions = context.global_document_ids, context.global_positions

    def mask_mod(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
        same = (documents[q_idx] == key_documents[kv_idx]) & (documents[q_idx] >= 0)
        return same & (key_positions[kv_idx] <= positions[q_idx])

    return mask_mod
