"""Unchanged Hugging Face models under context parallelism: ``attn_implementation="ringfeed"``.

In:   a batch's ``AllGatherContext`` and the cp group, handed through the model's own keyword arguments
Out:  attention over the keys of all ranks (``allgather.py``) in every layer, for any layout

    hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringfeed")
    hf.check_model(model)
    for batch in loader:
        logits = model(**batch.kwargs("hf"), ringfeed_group=cp_group).logits[0]  # [L, V]
        loss = scaled_loss(  # ringfeed.sharding.loss
            token_loss_sum(logits, batch.tensors["labels"]),
            global_supervised=batch.info.global_supervised,
            reduction="mean",
            dp_size=batch.info.dp_size,
            cp_size=batch.info.cp_size,
        )

Never pass ``labels`` to the model: its own loss shifts them by one, but a batch's labels are shifted already
(the neighbour of a rank's token may be elsewhere), and it divides by its own rank's count, not the step's.

The context goes with the call, so a layer that is computed again for activation checkpointing, later and
maybe in another thread, sees the batch that it saw before. Without a context attention raises: there is no
way to attend to a rank's own tokens only.

Shapes: L local tokens, H heads, V vocabulary.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringfeed.sharding.attention.allgather import AllGatherContext, allgather_attention
from ringfeed.sharding.attention.hf_mask import CausalMask, describe_mask
from ringfeed.sharding.optional import load_optional
from ringfeed.sharding.window import CAUSAL, Window

__all__ = ["NAME", "check_model", "hf_attention", "register"]

NAME = "ringfeed"
"""What to give as ``attn_implementation``."""
MINIMUM_VERSION = (4, 57)
_CALL = 'model(**batch.kwargs("hf"), ringfeed_group=cp_group)'
# What some models add to plain attention.
_UNSUPPORTED = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "indices",
    "block_indices",
    "output_attentions",
)


def register() -> None:
    """Make ``attn_implementation="ringfeed"`` known to transformers, in this process. Twice is as once.

    Raises:
        MissingDependencyError: if transformers is not installed.
        ImportError: if it is older than 4.57.
    """
    needed_for = f"attn_implementation={NAME!r}"
    transformers = load_optional("transformers", extra="hf", needed_for=needed_for)
    version = transformers.__version__
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MINIMUM_VERSION:
        raise ImportError(
            f"{needed_for} needs transformers 4.57 or newer, found {version}; "
            "run: pip install 'ringfeed[hf]'",
            name="transformers",
        )
    transformers.AttentionInterface.register(NAME, _outside_graphs(hf_attention))
    transformers.AttentionMaskInterface.register(NAME, _outside_graphs(describe_mask))


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    # A compiled model leaves its graph here: what attention does changes with every batch's documents.
    outside: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return outside


def check_model(model: Any) -> None:
    """Refuse a model that would not attend through ringfeed, before it trains on a rank's own tokens only.

    Args:
        model: a transformers ``PreTrainedModel``.

    Raises:
        ValueError: if its attention is another one, or its class does not look attention up.
    """
    chosen = model.config._attn_implementation
    if chosen != NAME:
        raise ValueError(
            f"the model's attn_implementation is {chosen!r}; call hf.register() and make the model with "
            f"attn_implementation={NAME!r}, or call model.set_attn_implementation({NAME!r})"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} has attention of its own and takes no attn_implementation={NAME!r}; "
            "transformers marks models that do by _supports_attention_backend"
        )


def hf_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' ``AttentionInterface`` wants it.

    Args:
        module: the model's attention layer.
        query: [1, H, L, D].
        key: [1, Hkv, L, D], Hkv divides H.
        value: [1, Hkv, L, Dv].
        attention_mask: what ``describe_mask`` returned, or None.
        **options: ``scaling``, ``dropout``, ``sliding_window`` and more from the model;
            ``ringfeed_context`` (an ``AllGatherContext``) and ``ringfeed_group`` (the cp ranks in cp order;
            not needed at cp 1) from the caller of the model.

    Returns:
        [1, L, H, Dv], causal within documents and under the layer's window, zero for padding; and None, since
        weights are never made.

    Raises:
        ValueError: if there is no context, or the model wants what this attention does not do.
    """
    context = _context(options)
    _check_model_wishes(module, options)
    context = context.with_window(_window(attention_mask, options.get("sliding_window")))
    if query.shape[0] != 1:
        raise ValueError(
            f"a batch is one row of packed documents, got query {list(query.shape)}; call {_CALL}"
        )
    q, k, v = (_cast(x)[0].transpose(0, 1) for x in (query, key, value))
    out = allgather_attention(
        q, k, v, context=context, group=options.get("ringfeed_group"), scale=options.get("scaling")
    )
    return out[None], None


def _context(options: dict[str, Any]) -> AllGatherContext:
    context = options.get("ringfeed_context")
    if context is None:
        raise ValueError(
            f"attention {NAME!r} was called without ringfeed_context, so it does not know the batch's "
            f"documents; call {_CALL}. If you did, this model does not hand keyword arguments on to its "
            "attention"
        )
    if not isinstance(context, AllGatherContext):
        raise ValueError(f"ringfeed_context must be an AllGatherContext, got {type(context).__name__}")  # noqa: TRY004
    if context.window != CAUSAL:
        raise ValueError(
            f"ringfeed_context has {context.window}, but the model's config says what layers see"
        )
    if context.num_parts > 1 and options.get("ringfeed_group") is None:
        raise ValueError(f"the batch is cut into {context.num_parts} parts: pass the cp group, {_CALL}")
    return context


def _check_model_wishes(module: Any, options: dict[str, Any]) -> None:
    if dropout := options.get("dropout"):
        raise ValueError(
            f"dropout={dropout} in attention: {NAME!r} has none; set attention_dropout=0 in the config"
        )
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            f"{type(module).__name__} is not causal; attention {NAME!r} is. Parts of a model may differ: "
            f'attn_implementation={{"text_config": {NAME!r}, "vision_config": "sdpa"}}'
        )
    for name in _UNSUPPORTED:
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"{type(module).__name__} wants {name}, which attention {NAME!r} does not do")


def _window(attention_mask: Any, sliding_window: int | None) -> Window:
    """Return what the layer's tokens see, from the mask that the model made for it."""
    if attention_mask is not None and not isinstance(attention_mask, CausalMask):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}, but attention {NAME!r} knows padding and "
            "documents from ringfeed_context; leave attention_mask out"
        )
    num_keys = sliding_window if attention_mask is None else attention_mask.window
    if sliding_window not in (None, num_keys):
        raise ValueError(f"the layer wants sliding_window={sliding_window}, but its mask has {num_keys}")
    # Transformers counts a token's own key, a window does not.
    return CAUSAL if num_keys is None else Window(num_keys - 1, 0)


def _cast(x: Tensor) -> Tensor:
    """Return ``x`` as autocast would hand it to SDPA; forward and backward then agree."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if is_cast else x
