"""Hooks that make a model's self-attention fit torch's ring: no mask, and SDPA over the cp mesh.

In:   a model whose attention modules are called ``self_attn`` and use ``F.scaled_dot_product_attention``
Out:  the same model, hooked

``attach_context_parallel_hooks`` takes explicit masks away; ``attach_cp_sdpa_hooks`` gives SDPA sharded
tensors also where ``torch.compile`` has hidden that they are (``sdpa_swap.py``).
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ringfeed.sharding.attention.sdpa_swap import SdpaSwap, process_swap

__all__ = ["attach_context_parallel_hooks", "attach_cp_sdpa_hooks"]

_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Where activation checkpointing, torch.compile and FSDP1 keep the module that they wrap."""


def attach_context_parallel_hooks(model: nn.Module) -> None:
    """Make every self-attention attend causally in place of taking a mask.

    A mask is made for the whole sequence and fits no rank's part. A hook on each module whose name is
    ``self_attn`` replaces an ``attention_mask`` by None and sets ``is_causal=True``, if a mask (None, too)
    is passed.

    Differs from the original: a mask that is passed by position is seen; ``cross_self_attn`` and the like
    are no ``self_attn``; attaching again adds no second hook; a module that cannot take ``is_causal``
    is refused here, before any module is hooked, and not in its first forward.

    Raises:
        ValueError: if a self-attention takes ``attention_mask``, but not ``is_causal``.
    """
    hooks = {module: _CausalHook.of(name, module) for name, module in _self_attentions(model)}
    for module, hook in hooks.items():
        if not any(isinstance(other, _CausalHook) for other in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def attach_cp_sdpa_hooks(model: nn.Module, cp_mesh: Any) -> None:
    """Let SDPA see that its q, k and v are sharded over ``cp_mesh``, during each self-attention's forward.

    In a compiled layer q, k and v are plain local tensors, so torch's ring would not start, and each rank
    would attend to its own part without a word. While a module whose name is ``self_attn`` runs,
    ``F.scaled_dot_product_attention`` is a wrapper outside of the compiled graph. It takes
    [B, heads, L, D], marks dim 2 as sharded and returns [B, heads, L, Dv]. It works inside
    ``torch.compile`` and activation checkpointing (the hook is on the wrapped module, so it is on in the
    recomputation).

    Differs from the original: SDPA is afterwards what it was before that forward, not what it was when
    attaching; one matching module inside another does not end the wrapper for the outer one; attaching
    again adds no second hook (the last ``cp_mesh`` counts); other threads' attention stays as it is; inside
    ``cp_dispatcher_suspended`` nothing is marked; ``cross_self_attn`` and the like are no ``self_attn``.

    Args:
        model: hooked in place. A copy made later shares the mesh.
        cp_mesh: one-dimensional mesh of the cp ranks.
    """
    swap = process_swap()
    for _, module in _self_attentions(model):
        attached = [hook for hook in map(_swap_hook, module._forward_pre_hooks.values()) if hook]
        for hook in attached:
            hook.cp_mesh = cp_mesh
        if not attached:
            hook = _SwapHook(swap, cp_mesh)
            module.register_forward_pre_hook(hook.before)
            # Also when forward, or somebody's hook, raises.
            module.register_forward_hook(hook.after, always_call=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CausalHook:
    mask_at: int | None
    """Which positional argument the mask is, None if it is none."""
    causal_at: int | None

    @classmethod
    def of(cls, name: str, module: nn.Module) -> "_CausalHook":
        parameters = list(inspect.signature(module.forward).parameters.values())
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        names = {p.name for p in parameters}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if "attention_mask" in names and "is_causal" not in names and not takes_any:
            raise ValueError(
                f"{name} ({type(module).__name__}) takes attention_mask, but not is_causal: without the mask "
                "it would attend to later tokens; give its forward an is_causal parameter, or **kwargs"
            )
        places = {p: i for i, p in enumerate(positional)}
        return cls(mask_at=places.get("attention_mask"), causal_at=places.get("is_causal"))

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = list(args)
        if self.mask_at is not None and self.mask_at < len(args):
            changed[self.mask_at] = None
        elif "attention_mask" in kwargs:
            kwargs = {**kwargs, "attention_mask": None}
        else:
            return args, kwargs
        if self.causal_at is not None and self.causal_at < len(args):
            changed[self.causal_at] = True
        else:
            kwargs = {**kwargs, "is_causal": True}
        return tuple(changed), kwargs


class _SwapHook:
    """One module's two hooks."""

    def __init__(self, swap: SdpaSwap, cp_mesh: Any) -> None:
        self.swap, self.cp_mesh = swap, cp_mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SwapHook":
        # Process groups cannot be copied, and a copied model runs over the same ones.
        return self

    def before(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        self.swap.enter(module, self.cp_mesh)

    def after(self, module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        self.swap.leave(module)


def _swap_hook(hook: Any) -> _SwapHook | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _SwapHook) else None


def _self_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each ``self_attn``, without what checkpointing and others put around it."""
    for name, found in model.named_modules():
        if name.rpartition(".")[2] == "self_attn":
            yield name, _unwrapped(found)


def _unwrapped(module: nn.Module) -> nn.Module:
    # Only what is registered: FSDP1 and checkpoint wrappers forward other attributes to the inner module.
    for attribute in _WRAPPED:
        inner = module._modules.get(attribute)
        if inner is not None:
            return _unwrapped(inner)
    return module
