"""Names of nemo-automodel 0.7.0's context parallelism, as a thin shell over ringfeed's types.

In:   what those functions take: tensors, and a mesh that knows its size and rank
Out:  what those functions return for well-formed input, computed by ``layouts.py``

Signatures and error types are the original's. Where the original answers ill-formed input
with a wrong partition and no word, this module raises ValueError.
"""

from ringfeed.sharding.automodel_indices import (
    _reorder_gathered_token_tensor,
    contiguous_local_indices,
    gather_token_tensor_by_indices,
    identity_local_indices,
    round_robin_local_indices,
    shard_token_tensor_by_indices,
    thd_get_partitioned_indices,
)
from ringfeed.sharding.automodel_te import _shard_thd_chunk_for_te, make_cp_batch_for_te
from ringfeed.sharding.automodel_thd import (
    process_input_for_thd,
    split_batch_into_thd_chunks,
    thd_padding_mask_from_token_ids,
)

__all__ = [
    "_reorder_gathered_token_tensor",
    "_shard_thd_chunk_for_te",
    "contiguous_local_indices",
    "gather_token_tensor_by_indices",
    "identity_local_indices",
    "make_cp_batch_for_te",
    "process_input_for_thd",
    "round_robin_local_indices",
    "shard_token_tensor_by_indices",
    "split_batch_into_thd_chunks",
    "thd_get_partitioned_indices",
    "thd_padding_mask_from_token_ids",
]
