"""Open a plan with a layout: decide the slots of a pack, or say why it cannot be opened.

In:   a ``Plan`` (``pipeline/plan.py``) and a layout (``sharding/layouts.py``)
Out:  one ``ViewSpec``, all that turns packs into views

A plan is made for no layout. It promises that every pack fits ``pack_tokens`` when each piece is
padded to ``pad_multiple``; a layout may need another multiple, and then lengths decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfeed.sharding.layouts import Layout

__all__ = ["ViewSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewSpec:
    """How packs become views. Two sources with equal ``facts()`` give the same bytes."""

    layout: Layout
    cp_size: int
    pack_slots: int
    """T of a pack, the same for the whole run."""
    multiple: int
    """Every slot is a multiple of this: the layout's document multiple at this cp size."""
    pad_id: int
    tp_size: int = 1
    unit: int = 1
    """FP8 unit of the local length."""
    positions: str = "restart"
    """"restart" | "continue": do positions of a later piece of a document start again at 0?"""
    boundary: str = "next"
    """"next" | "ignore": the last label of a piece whose document goes on."""

    def facts(self) -> dict[str, Any]:
        """Return this as JSON-able values; ``from_facts`` is the way back."""
        return {
            "layout": self.layout.name,
            "layout_options": dict(self.layout.options),
            "cp_size": self.cp_size,
            "pack_slots": self.pack_slots,
            "multiple": self.multiple,
            "pad_id": self.pad_id,
            "tp_size": self.tp_size,
            "unit": self.unit,
            "positions": self.positions,
            "boundary": self.boundary,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> ViewSpec:
        """Rebuild a spec from ``facts()``.

        Raises:
            ValueError: if the layout is not known to this version.
        """
        from ringfeed.sharding.layouts import make_layout

        layout = make_layout(str(facts["layout"]), **dict(facts["layout_options"]))
        names = ("cp_size", "pack_slots", "multiple", "pad_id", "tp_size", "unit", "positions", "boundary")
        return cls(layout=layout, **{name: facts[name] for name in names})
