"""Set TransformerEngine's attention up for context and tensor parallelism.

In:   a model whose ``self_attn`` modules hold a ``DotProductAttention``; cp and tp submeshes
Out:  the same modules, which now exchange keys and values over the cp ranks

What these modules are called with is ``Batch.kwargs("te")``; its tokens must be in the layout ``te``.

Padding is one choice per run, ``Batch.kwargs("te", pads=...)``. ``"attend"``, the default, gives slot
offsets as real ones too and ``pad_between_seqs=False``: under a causal mask a document's pads come behind
it, so no real token sees one, every real row is exact, and all of TransformerEngine's kernels can be used.
``"exact"`` gives both kinds of offsets and ``pad_between_seqs=True``, which several kernels do not take.
Leaving ``pad_between_seqs`` out is no choice: TransformerEngine's own guess misses pads that are only
behind the last document. ``te_limits.py`` has what else to watch.
"""

import warnings
from typing import TYPE_CHECKING, Any

from ringfeed.sharding.attention.te_communication import RING, TeCommunication, has_window
from ringfeed.sharding.optional import load_optional

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attach_te_context_parallel", "configure_te_attention"]

_MODULE = "transformer_engine.pytorch.attention"
_SUFFIX = "self_attn"


def attach_te_context_parallel(model: "nn.Module", cp_mesh: Any = None, tp_mesh: Any = None) -> int:
    """Set up every TransformerEngine attention of ``model``, with the ring as communication.

    Looked at is ``attn_module`` of each module whose name ends in ``self_attn``.

    Differs from the original: heads that do not divide are refused before any module is changed; a
    model without such a module is warned about; a window that only the attention itself knows of is
    seen, too; on a machine without CUDA the stream is None, so that stand-ins work.

    Args:
        model: the model, or a pipeline stage of it.
        cp_mesh: one-dimensional cp submesh; nothing about cp is set at size 1 or None.
        tp_mesh: one-dimensional tp submesh; nothing about tp is set at size 1 or None.

    Returns:
        The number of attention modules set up, counted also where there was nothing to set.

    Raises:
        ImportError: if TransformerEngine is not installed.
        ValueError: if a module's heads or groups cannot be split over the tp ranks.
    """
    return configure_te_attention(model, cp_mesh=cp_mesh, tp_mesh=tp_mesh)


def configure_te_attention(
    model: "nn.Module", *, cp_mesh: Any = None, tp_mesh: Any = None, communication: TeCommunication = RING
) -> int:
    """Set up every TransformerEngine attention of ``model``, with a choice of communication.

    Args:
        model: as ``attach_te_context_parallel``.
        cp_mesh: as ``attach_te_context_parallel``.
        tp_mesh: as ``attach_te_context_parallel``.
        communication: how the cp ranks exchange tokens.

    Returns:
        The number of attention modules, as ``attach_te_context_parallel``.

    Raises:
        ImportError: if TransformerEngine is not installed.
        ValueError: if a module's heads or groups cannot be split over the tp ranks and, where the
            communication scatters heads, over the cp ranks; or the communication does not fit the cp size.
    """
    attention_class = _attention_class()
    cp_size, tp_size = _size(cp_mesh), _size(tp_mesh)
    found = _attention_modules(model, attention_class)
    head_ranks = communication.head_ranks(cp_size) if cp_size > 1 else 1
    # All checks and everything that can fail come first: a model is set up whole or not at all.
    for name, _, attention in found:
        _check_heads(name, attention, tp_size=tp_size, head_ranks=head_ranks)
    if not found:
        _warn_of_nothing(model, attention_class)
        return 0
    tp_group = tp_mesh.get_group() if tp_size > 1 else None
    bound = communication.bind(cp_mesh) if cp_size > 1 else None
    for _, module, attention in found:
        if tp_size > 1:
            attention.tp_size = tp_size
            attention.num_gqa_groups_per_partition = attention.num_gqa_groups // tp_size
            attention.set_tensor_parallel_group(tp_group)
        if bound is not None:
            bound.apply(attention, window=has_window(module, attention))
    return len(found)


def _attention_class() -> Any:
    module = load_optional(_MODULE, extra="te", needed_for="TransformerEngine attention")
    try:
        return module.DotProductAttention
    except AttributeError as error:
        raise ImportError(
            f"{_MODULE} has no DotProductAttention; ringfeed needs version 2.8 or newer"
        ) from error


def _size(mesh: Any) -> int:
    return 1 if mesh is None else int(mesh.size())


def _attention_modules(model: "nn.Module", attention_class: Any) -> list[tuple[str, Any, Any]]:
    """Return name, module and attention of each module that is to be set up."""
    named = [
        (name, module, getattr(module, "attn_module", None))
        for name, module in model.named_modules()
        if name.endswith(_SUFFIX)
    ]
    return [entry for entry in named if isinstance(entry[2], attention_class)]


def _check_heads(name: str, attention: Any, *, tp_size: int, head_ranks: int) -> None:
    if tp_size * head_ranks == 1:
        return
    heads, groups = attention.num_attention_heads, attention.num_gqa_groups
    if heads % (tp_size * head_ranks) or groups % (tp_size * head_ranks):
        over_cp = f" * {head_ranks} cp ranks that exchange heads" if head_ranks > 1 else ""
        raise ValueError(
            f"{name} has num_attention_heads={heads} and num_gqa_groups={groups}, but both must be a "
            f"multiple of {tp_size * head_ranks} (tp_size={tp_size}{over_cp}); no module was changed"
        )


def _warn_of_nothing(model: "nn.Module", attention_class: Any) -> None:
    elsewhere = [name for name, module in model.named_modules() if isinstance(module, attention_class)]
    told = f"; it has DotProductAttention at {', '.join(map(repr, elsewhere[:3]))}" if elsewhere else ""
    warnings.warn(
        f"no TransformerEngine attention was set up: {type(model).__name__} has no module that is named "
        f"...{_SUFFIX} and whose attn_module is a DotProductAttention{told}",
        stacklevel=4,
    )
