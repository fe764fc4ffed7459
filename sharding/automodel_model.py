"""What a model says about itself: its attention backend, and whether it has a vision or audio tower.

In:   a live model, or None
Out:  plain answers for ``automodel_resolve.py``

Names, signatures and answers are those of nemo-automodel 0.7.0 (``automodel.py``).
"""

from typing import Any

__all__: list[str] = []

_TOWER_CONFIGS = ("vision_config", "audio_config")
_TOWERS = ("visual", "vision_model", "vision_tower", "audio_model", "audio_tower")


def _attention_backend(model: Any) -> str | None:
    """Return the attention backend that ``model`` was configured with, or None.

    ``model.backend.attn`` counts first, even if empty; then ``_attn_implementation`` or else
    ``_attn_implementation_internal`` of the config, and of its ``text_config``. An enum is told by its
    ``str``, which for a plain one is not its value.
    """
    backend = getattr(getattr(model, "backend", None), "attn", None)
    if backend is not None:
        return str(backend)
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        found = getattr(part, "_attn_implementation", None) or getattr(
            part, "_attn_implementation_internal", None
        )
        if found is not None:
            return str(found)
    return None


def _uses_te_attention(model: Any) -> bool:
    """Return whether ``model`` uses TransformerEngine's attention, its own or injected."""
    return _attention_backend(model) == "te" or bool(getattr(model, "_te_attention_injected", False))


def _is_multimodal_model(model: Any) -> bool:
    """Return whether ``model`` has a vision or audio tower, or a configuration for one."""
    config = getattr(model, "config", None)
    return any(getattr(config, name, None) is not None for name in _TOWER_CONFIGS) or any(
        getattr(model, name, None) is not None for name in _TOWERS
    )
