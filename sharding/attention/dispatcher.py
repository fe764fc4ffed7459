"""Torch's ring attention as a process-wide switch: read it, keep it as it is, turn it off for a while.

In:   torch's private ``_context_parallel._attention``, entered by ``torch_cp.py``
Out:  ``cp_dispatcher_suspended``, and what ``torch_cp.py``, ``sdpa_hooks.py`` and ``flex_cp.py`` ask of it

Torch turns the ring on by putting a wrapper in place of ``F.scaled_dot_product_attention`` and by
handlers in DTensor's dispatcher; its options are module globals. All of it is private. This file is
the one place that names these internals, and a name that is gone is an error, never a ring that
silently stays on.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

__all__ = [
    "Sdpa",
    "beneath_ring",
    "cp_dispatcher_suspended",
    "kept_options",
    "ring_is_suspended",
    "torch_internal",
]

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_RING_PARTS = (
    "_replaced_functions",
    "_enable_context_parallel_dispatcher_impl",
    "_disable_context_parallel_dispatcher_impl",
    "_enable_cp_dtensor_dispatcher",
    "_disable_cp_dtensor_dispatcher",
    "_dispatch_mode",
    "_DispatchMode",
    "custom_ops",
    "DTensor",
)
"""What the ring consists of in torch 2.13. If one is gone, the rest is not what this file knows either."""

_suspended: ContextVar[bool] = ContextVar("ringfeed_ring_suspended", default=False)

Sdpa = Callable[..., Any]
"""What is called like ``F.scaled_dot_product_attention``."""


def torch_internal(name: str) -> Any:
    """Return ``name`` of torch's context-parallel module.

    Raises:
        RuntimeError: if this torch has no such name.
    """
    try:
        return getattr(importlib.import_module(_MODULE), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no {_MODULE}.{name}, by which ringfeed steers torch's ring "
            "attention; ringfeed is made for torch 2.13"
        ) from error


def beneath_ring(sdpa: Sdpa) -> Sdpa | None:
    """Return the attention that torch's ring wraps if ``sdpa`` is that ring, else None.

    Raises:
        RuntimeError: if torch keeps its ring otherwise than this module knows.
    """
    replaced = torch_internal("_replaced_functions")
    if sdpa in replaced:
        _, original = replaced[sdpa]
        return original  # type: ignore[no-any-return]
    if getattr(sdpa, "__module__", None) == _MODULE:
        raise RuntimeError(
            f"F.scaled_dot_product_attention is {_MODULE}.{getattr(sdpa, '__name__', '?')}, which torch "
            f"{torch.__version__} does not list in _replaced_functions: is its ring kept elsewhere now?"
        )
    return None


@contextmanager
def kept_options() -> Iterator[Any]:
    """Put torch's context-parallel options back at the end; yields them, to be changed.

    They are the rotate method, load balancing and the dispatch mode. Torch's own functions set the last
    two as a side effect. A ring that is on then never lets go of SDPA, and later sequences are cut
    without balance.
    """
    options, mode = torch_internal("_cp_options"), torch_internal("_dispatch_mode")
    module: Any = importlib.import_module(_MODULE)
    before = (options.rotate_method, options.enable_load_balance)
    try:
        yield options
    finally:
        options.rotate_method, options.enable_load_balance = before
        module._dispatch_mode = mode


@contextmanager
def cp_dispatcher_suspended(cp_mesh: Any) -> Iterator[None]:
    """Attend without torch's ring inside, with the same ring again afterwards.

    For attention over what is not sharded, such as a vision tower's, in the middle of a model that runs
    in ``create_context_parallel_ctx``. The ring comes back after an exception, too.

    Differs from the original: the ring that comes back is the one that was there, so its mesh and
    sequence dimension are what they were (the original installs a new one over ``cp_mesh``, dimension 2);
    and where torch has changed or something stands over the ring, this raises and does not do nothing.

    Args:
        cp_mesh: None or a size of 1 does nothing, as does a process without a ring.

    Raises:
        RuntimeError: if torch's internals are not those of torch 2.13, or SDPA was patched over the ring.
    """
    if cp_mesh is None or cp_mesh.size() <= 1:
        yield
        return
    for part in _RING_PARTS:
        torch_internal(part)
    ring = F.scaled_dot_product_attention
    original = beneath_ring(ring)
    if original is None:
        _refuse_hidden_ring(ring)
        yield
        return
    F.scaled_dot_product_attention = original
    torch_internal("_disable_cp_dtensor_dispatcher")()
    token = _suspended.set(True)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = ring
        torch_internal("_enable_cp_dtensor_dispatcher")()
        _suspended.reset(token)


def ring_is_suspended() -> bool:
    """Return whether this is inside ``cp_dispatcher_suspended`` with a ring."""
    return _suspended.get()


def _refuse_hidden_ring(sdpa: Sdpa) -> None:
    """Raise if the ring is on by patching, and ``sdpa`` is something else."""
    patches = torch_internal("_dispatch_mode") is torch_internal("_DispatchMode").MONKEY_PATCH
    handlers = torch_internal("DTensor")._op_dispatcher._custom_op_handlers
    if patches and torch_internal("custom_ops").keys() <= handlers.keys():
        raise RuntimeError(
            f"torch's ring is on, but F.scaled_dot_product_attention is {sdpa!r}, put over it: ringfeed "
            "cannot see what is underneath. Patch SDPA before the context-parallel context is entered"
        )
