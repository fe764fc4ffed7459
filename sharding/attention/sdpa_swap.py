"""The wrapper that stands for ``F.scaled_dot_product_attention`` while a hooked attention runs.

In:   ``enter`` and ``leave`` from the hooks of ``sdpa_hooks.py``; local q, k, v [B, heads, L, D]
Out:  the attention that was there before, called with tensors that are known to be sharded

The swap is process-wide because the function is, and there is one swap for all hooks and meshes: two that
swap independently would end up calling each other.
"""

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ringfeed.sharding.attention.dispatcher import Sdpa, beneath_ring, ring_is_suspended

__all__ = ["SdpaSwap", "process_swap"]

_SEQ_DIM = 2


class SdpaSwap:
    """Who is inside a hooked forward, by thread. SDPA is the wrapper while anybody is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[int, list[tuple[nn.Module, Any]]] = {}
        self._below: Sdpa = F.scaled_dot_product_attention
        # Torch makes its list of overridable functions once, from what it finds, and a trace may be the
        # first to ask: the wrapper would be on it for ever, and SDPA not.
        torch.overrides.get_overridable_functions()
        # Not traced: a compiled graph ends before each of them and goes on after it. One wrapper for
        # ever, because a graph is compiled again when the function that it found has changed.
        untraced: Any = torch.compiler.disable
        self.enter = untraced(self._enter)
        self.leave = untraced(self._leave)
        self.wrapper = untraced(self._attend)

    def _enter(self, module: nn.Module, cp_mesh: Any) -> None:
        with self._lock:
            if not self._inside:
                self._below = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = self.wrapper
            self._inside.setdefault(threading.get_ident(), []).append((module, cp_mesh))

    def _leave(self, module: nn.Module) -> None:
        with self._lock:
            thread = threading.get_ident()
            stack = self._inside.get(thread, [])
            # Not inside if a hook of somebody else failed before ours: nothing to undo then. Inside twice if
            # a forward was interrupted (KeyboardInterrupt): from its first time on, all is left.
            if not _drop_from(stack, module):
                return
            if not stack:
                del self._inside[thread]
            if not self._inside:
                F.scaled_dot_product_attention = self._below

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Somebody may have kept the wrapper, and call it when SDPA is something else again.
        below = self._below if self._inside else F.scaled_dot_product_attention
        stack = self._inside.get(threading.get_ident())
        if not stack or ring_is_suspended():
            return below(query, key, value, *args, **kwargs)
        cp_mesh = stack[-1][1]
        q, k, v = (_sharded(x, cp_mesh) for x in (query, key, value))
        # The ring's own wrapper does the same marking and takes no marked tensors.
        out = (beneath_ring(below) or below)(q, k, v, *args, **kwargs)
        return out.to_local() if isinstance(out, DTensor) else out


@functools.cache
def process_swap() -> SdpaSwap:
    """Return the one swap of this process."""
    return SdpaSwap()


def _sharded(x: Tensor, cp_mesh: Any) -> Tensor:
    return x if isinstance(x, DTensor) else DTensor.from_local(x, cp_mesh, [Shard(_SEQ_DIM)])


def _drop_from(stack: list[tuple[nn.Module, Any]], module: nn.Module) -> bool:
    """Take ``module`` and all that is above it off the stack; False if it is not on it."""
    for i, (entered, _) in enumerate(stack):
        if entered is module:
            del stack[i:]
            return True
    return False
