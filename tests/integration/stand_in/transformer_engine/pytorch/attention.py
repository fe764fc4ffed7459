"""THD attention over cp ranks as ``DotProductAttention`` has it, of which only what is used is here."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringfeed.sharding import make_layout
from ringfeed.sharding.attention.allgather import allgather_attention
from ringfeed.sharding.attention.chunk_context import allgather_context


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        attention_dropout: float,
        qkv_format: str,
        attn_mask_type: str,
    ) -> None:
        super().__init__()
        assert (attention_dropout, qkv_format, attn_mask_type) == (0.0, "thd", "padding_causal")
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups
        self.num_gqa_groups_per_partition = num_gqa_groups
        self.kv_channels, self.tp_size, self.window_size = kv_channels, 1, (-1, 0)
        self.cp_group: dist.ProcessGroup | None = None
        self.cp_stream, self.cp_comm_type = None, ""

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type) -> None:
        assert cp_global_ranks == dist.get_process_group_ranks(cp_group)
        self.cp_group, self.cp_stream, self.cp_comm_type = cp_group, cp_stream, cp_comm_type

    def forward(  # noqa: PLR0913 - the arguments of TransformerEngine
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        qkv_format: str,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        cu_seqlens_q_padded: Tensor,
        cu_seqlens_kv_padded: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        pad_between_seqs: bool,
    ) -> Tensor:
        """[L, H, D] and [L, Hkv, D] -> [L, H * D], for this rank's two pieces of every sequence."""
        assert query_layer.shape[1:] == (self.num_attention_heads, self.kv_channels)
        assert (qkv_format, pad_between_seqs) == ("thd", not torch.equal(cu_seqlens_q, cu_seqlens_q_padded))
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert torch.equal(cu_seqlens_q_padded, cu_seqlens_kv_padded)
        assert max_seqlen_q == max_seqlen_kv == int(cu_seqlens_q_padded.diff().max())
        size, rank = (1, 0) if self.cp_group is None else (self.cp_group.size(), self.cp_group.rank())
        maps = make_layout("te").index_maps(cu_seqlens_q_padded, cp_size=size)
        context = allgather_context(cu_seqlens_q, cu_seqlens_q_padded, maps, rank)
        out = allgather_attention(query_layer, key_layer, value_layer, context=context, group=self.cp_group)
        return out.flatten(1)
