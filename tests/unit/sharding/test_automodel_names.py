"""Names, arguments, kinds and defaults are those of nemo-automodel 0.7.0: a trainer changes one import.

Read from its source; never regenerate from ringfeed.
"""

import dataclasses
import inspect

import pytest

from ringfeed.sharding import automodel

# Positional arguments, then, after the star, keyword-only ones.
SIGNATURES = {
    "attach_context_parallel_hooks": "model",
    "attach_cp_sdpa_hooks": "model, cp_mesh",
    "attach_te_context_parallel": "model, cp_mesh=None, tp_mesh=None",
    "cp_dispatcher_suspended": "cp_mesh",
    "create_context_parallel_ctx": (
        "cp_mesh, cp_buffers, cp_seq_dims, cp_no_restore_buffers, cp_rotate_method=None"
    ),
    "get_train_context": "enable_loss_parallel, enable_compiled_autograd, cp_context=None",
    "make_cp_batch_for_te": (
        "cp_mesh, batch, qkv_format='thd', padding_token_id=0, num_chunks=1, "
        "seq_lens_padding_value=-1000, return_local_indices=False"
    ),
    "unshard_context_parallel_tensor": "cp_mesh, tensor, *, seq_dim",
    "_attention_backend": "model",
    "_get_submesh": "device_mesh, dim",
    "_is_multimodal_model": "model",
    "_magi_state_from_model": "model, device_mesh",
    "_make_cp_batch_and_ctx": (
        "device_mesh, batch, loss_mask=None, use_te=False, padding_token_id=0, num_chunks=1, "
        "seq_lens_padding_value=-1000, magi=None, model=None, cp_sharder=None, "
        "extra_seq_buffers=None"
    ),
    "_mesh_dim_size": "device_mesh, dim",
    "_prepare_cp_sharder": (
        "model, device_mesh, batch, *, padding_token_id=0, num_chunks=1, loss_mask=None, "
        "invoke_pre_embed=True, extra_seq_buffers=None"
    ),
    "_resolve_cp_sharder": (
        "cp_mesh, model_sharder, *, magi, is_thd, num_chunks, seq_lens_padding_value, model, "
        "extra_seq_buffers=None"
    ),
    "_shard_grad_buffer_for_cp": "buffer, seq_dim, cp_mesh",
    "_shard_thd_chunk_for_te": "batch, cp_mesh, qkv_format, seq_lens_padding_value, padding_token_id",
    "_uses_te_attention": "model",
    "contiguous_local_indices": "cp_mesh, padded_seq_len, device=None",
    "identity_local_indices": "cp_mesh, padded_seq_len, device=None",
    "round_robin_local_indices": "cp_mesh, padded_seq_len, device=None",
    "shard_batch_identity": "cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0",
    "shard_batch_contiguous": (
        "cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0, pad_multiple=1, "
        "extra_seq_keys=None, extra_pad_values=None, shard_primary=True"
    ),
    "shard_batch_load_balanced": (
        "cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0, extra_seq_buffers=None"
    ),
    "shard_batch_aux_only": (
        "cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0, extra_seq_buffers=None"
    ),
    "shard_token_tensor_by_indices": "tensor, local_indices, seq_dim=1",
    "gather_token_tensor_by_indices": "cp_mesh, tensor, local_indices, seq_dim=1",
    "_reorder_gathered_token_tensor": "parts, index_parts, seq_dim=1",
    "shard_sequence_for_cp_round_robin": "cp_mesh, tensor, *, seq_dim=1, pad_value=0",
    "shard_sequence_for_cp_contiguous": "cp_mesh, tensor, *, seq_dim=1, pad_value=0, pad_multiple=1",
    "convert_attention_mask_to_padding_mask": "batch",
    "process_input_for_thd": "batch, seq_lens_padding_value=-1000, padding_token_id=0",
    "split_batch_into_thd_chunks": "batch, num_chunks, seq_lens_padding_value=-1000, padding_token_id=0",
    "thd_padding_mask_from_token_ids": "input_ids, padding_token_id",
    "ContextParallelSharder.__init__": (
        "model=None, device_mesh=None, batch=None, *, shard_batch=None, "
        "local_token_global_indices=None, shard_layout=None, padding_token_id=0, num_chunks=1, "
        "loss_mask=None, invoke_pre_embed=True, extra_seq_buffers=None"
    ),
    "ContextParallelSharder.shard": "batch",
    "ContextParallelSharder.shard_token_tensor": "tensor, seq_dim=1, fill=None",
    "ContextParallelSharder.gather_token_tensor": "tensor, seq_dim=1, trim=False, fill=None",
    "MagiState.make_cp_batch": (
        "cp_mesh, batch, *, padding_token_id=0, num_chunks=1, is_thd=False, model=None, "
        "return_local_indices=False"
    ),
}
FIELDS = {
    "ShardLayout": (
        "local_token_global_indices",
        "original_seq_len",
        "padded_seq_len",
        "input_row_shape",
        "input_token_stream_positions",
    ),
    "MagiState": ("enabled", "custom", "cp_group", "cp_size", "domain", "device_mesh"),
}


def found(name):
    value = automodel
    for part in name.split("."):
        value = getattr(value, part)
    return value


def written(function):
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{parameter.name}{default}")
    return ", ".join(part for part in parts if part != "self")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_originals(name):
    assert written(found(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_the_originals_in_order(name):
    assert tuple(field.name for field in dataclasses.fields(found(name))) == FIELDS[name]


def test_layouts_are_frozen_and_compare_by_value():
    layout = automodel.ShardLayout(original_seq_len=6, padded_seq_len=8)

    assert layout == automodel.ShardLayout(None, 6, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(layout, "padded_seq_len", 9)  # noqa: B010 - a plain assignment fails the type check


def test_all_names_are_sorted_and_there():
    assert sorted(automodel.__all__) == automodel.__all__
    assert all(hasattr(automodel, name) for name in automodel.__all__)
    assert {name.split(".")[0] for name in SIGNATURES} <= set(automodel.__all__)
