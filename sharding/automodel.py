"""Names of nemo-automodel 0.7.0's context parallelism, as a thin shell over ringfeed's types.

In:   what those functions take: tensors, and a mesh that knows its size and rank
Out:  what those functions return for well-formed input, computed by ``layouts.py``

A trainer changes one import. Signatures, defaults, fields, methods and error types are the
original's. Where the original loses or mixes up data without a word, this module does the right thing or
raises ValueError; each docstring says so under "Differs from the original". No function changes a
batch that it is given, but for ``convert_attention_mask_to_padding_mask``, which does nothing else.

A mesh is a ``DeviceMesh`` or any mapping with ``mesh_dim_names``; a submesh needs ``size`` and
``get_local_rank``, and ``get_group`` to gather. No arithmetic needs a GPU, TransformerEngine, MagiAttention
or a process group.
"""

from ringfeed.sharding.attention.dispatcher import cp_dispatcher_suspended
from ringfeed.sharding.attention.sdpa_hooks import attach_context_parallel_hooks, attach_cp_sdpa_hooks
from ringfeed.sharding.attention.te import attach_te_context_parallel
from ringfeed.sharding.attention.torch_cp import (
    create_context_parallel_ctx,
    get_train_context,
    unshard_context_parallel_tensor,
)
from ringfeed.sharding.attention.torch_cp import shard_grad_buffer_for_cp as _shard_grad_buffer_for_cp
from ringfeed.sharding.automodel_batches import (
    convert_attention_mask_to_padding_mask,
    shard_batch_contiguous,
    shard_batch_identity,
    shard_sequence_for_cp_contiguous,
    shard_sequence_for_cp_round_robin,
)
from ringfeed.sharding.automodel_indices import (
    _reorder_gathered_token_tensor,
    contiguous_local_indices,
    gather_token_tensor_by_indices,
    identity_local_indices,
    round_robin_local_indices,
    shard_token_tensor_by_indices,
    thd_get_partitioned_indices,
)
from ringfeed.sharding.automodel_magi import MagiState, _magi_state_from_model
from ringfeed.sharding.automodel_model import _attention_backend, _is_multimodal_model, _uses_te_attention
from ringfeed.sharding.automodel_resolve import (
    _make_cp_batch_and_ctx,
    _prepare_cp_sharder,
    _resolve_cp_sharder,
)
from ringfeed.sharding.automodel_ring import shard_batch_aux_only, shard_batch_load_balanced
from ringfeed.sharding.automodel_sharder import ContextParallelSharder, ShardLayout
from ringfeed.sharding.automodel_te import _shard_thd_chunk_for_te, make_cp_batch_for_te
from ringfeed.sharding.automodel_thd import (
    process_input_for_thd,
    split_batch_into_thd_chunks,
    thd_padding_mask_from_token_ids,
)
from ringfeed.sharding.mesh import get_submesh as _get_submesh
from ringfeed.sharding.mesh import mesh_axis_size as _mesh_dim_size

__all__ = [
    "ContextParallelSharder",
    "MagiState",
    "ShardLayout",
    "_attention_backend",
    "_get_submesh",
    "_is_multimodal_model",
    "_magi_state_from_model",
    "_make_cp_batch_and_ctx",
    "_mesh_dim_size",
    "_prepare_cp_sharder",
    "_reorder_gathered_token_tensor",
    "_resolve_cp_sharder",
    "_shard_grad_buffer_for_cp",
    "_shard_thd_chunk_for_te",
    "_uses_te_attention",
    "attach_context_parallel_hooks",
    "attach_cp_sdpa_hooks",
    "attach_te_context_parallel",
    "contiguous_local_indices",
    "convert_attention_mask_to_padding_mask",
    "cp_dispatcher_suspended",
    "create_context_parallel_ctx",
    "gather_token_tensor_by_indices",
    "get_train_context",
    "identity_local_indices",
    "make_cp_batch_for_te",
    "process_input_for_thd",
    "round_robin_local_indices",
    "shard_batch_aux_only",
    "shard_batch_contiguous",
    "shard_batch_identity",
    "shard_batch_load_balanced",
    "shard_sequence_for_cp_contiguous",
    "shard_sequence_for_cp_round_robin",
    "shard_token_tensor_by_indices",
    "split_batch_into_thd_chunks",
    "thd_get_partitioned_indices",
    "thd_padding_mask_from_token_ids",
    "unshard_context_parallel_tensor",
]
