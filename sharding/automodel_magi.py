"""What MagiAttention needs of every batch, from a model that is configured for it.

In:   a model whose attention backend is "magi", and the mesh
Out:  ``MagiState``, which prepares batches; None for other models

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``). Who holds what
is computed by the layout ``magi``; MagiAttention itself is only asked for its runtime key, and only
where tokens are dispatched.

Shapes: B rows, S tokens in a row, T tokens of the stream, T' with padding, L local tokens, R cp ranks.
"""

from dataclasses import dataclass
from typing import Any

from ringfeed.sharding.automodel_model import _attention_backend, _is_multimodal_model
from ringfeed.sharding.mesh import get_submesh

__all__ = ["MagiState"]


@dataclass(slots=True)
class MagiState:
    """How a model uses MagiAttention; one that is not enabled prepares nothing."""

    enabled: bool = False
    custom: bool = False
    """The model's own attention calls MagiAttention; else Hugging Face's interface does."""
    cp_group: Any = None
    cp_size: int = 1
    domain: str = "llm"
    """"llm", or "vlm" for a model with a vision or audio tower."""
    device_mesh: Any = None

    @property
    def hf_dispatch(self) -> bool:
        """Whether each batch is one causal sequence that is dispatched for Hugging Face's interface."""
        return self.enabled and not self.custom


def _magi_state_from_model(model: Any, device_mesh: Any) -> MagiState | None:
    """Return the Magi state of ``model`` on ``device_mesh``; None unless its attention backend is "magi".

    Works without MagiAttention. Without a mesh, or a ``cp`` axis in it, R is 1 and there is no group.
    """
    if model is None or _attention_backend(model) != "magi":
        return None
    cp_mesh = get_submesh(device_mesh, "cp")
    cp_group = None if cp_mesh is None else cp_mesh.get_group()
    return MagiState(
        enabled=True,
        custom=getattr(getattr(model, "backend", None), "attn", None) == "magi",
        cp_group=cp_group,
        cp_size=1 if cp_group is None else int(cp_group.size()),
        domain="vlm" if _is_multimodal_model(model) else "llm",
        device_mesh=device_mesh,
    )
