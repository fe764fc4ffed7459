"""Turn the facts that ``inspect.py`` gathers into text.

In:   JSON-able facts of a folder, with or without a step
Out:  lines for a terminal
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["as_text"]

_RUNS_SHOWN = 6
_TEXT_SHOWN = 40


def as_text(facts: Mapping[str, Any]) -> str:
    """Return the facts as lines: the folder first, then its step."""
    lines = [f"{facts['kind']} {facts['path']}"]
    for name, value in facts.items():
        if name not in ("kind", "path", "step"):
            lines += _entry(name, value, indent="  ")
    if "step" in facts:
        lines += _step(facts["step"])
    return "\n".join(lines)


def _entry(name: str, value: object, indent: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield f"{indent}{name}"
        for key, inner in value.items():
            yield from _entry(key, inner, indent + "  ")
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        yield f"{indent}{name}"
        for inner in value:
            yield f"{indent}  " + ", ".join(f"{key} {_cell(cell)}" for key, cell in inner.items())
    else:
        yield f"{indent}{name:<24}{_cell(value)}"


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value)) or "-"
    return str(value or "-")


def _step(step: Mapping[str, Any]) -> Iterator[str]:
    yield f"step {step['step']}: {len(step['packs'])} packs, chain {step['chain']}"
    for pack in step["packs"]:
        supervised = pack["supervised_by_source"]
        shown = "supervised unknown" if supervised is None else f"supervised {sum(supervised):,}"
        yield (
            f"  pack {pack['pack']}: slate {pack['slate']} (micro-batch {pack['micro_batch']}, dp rank "
            f"{pack['dp_rank']}), cost {pack['cost']:,}, {pack['tokens']:,} tokens in "
            f"{pack['slots']:,} slots, fill {pack['fill']:.4f}, "
            f"{shown}, {len(pack['pieces'])} pieces"
        )
        yield from map(_piece, pack["pieces"])
        for rank, runs in enumerate(pack.get("runs", ())):
            yield f"    cp {rank} holds {_runs(runs)}"


def _piece(piece: Mapping[str, Any]) -> str:
    end = piece["start"] + piece["length"]
    line = f"    document {piece['document']} [{piece['start']}:{end}] epoch {piece['epoch']}"
    return line if "text" not in piece else f"{line}  {piece['text'][:_TEXT_SHOWN]!r}"


def _runs(runs: list[list[int]]) -> str:
    shown = ", ".join(f"[{start}:{start + length}]" for start, length in runs[:_RUNS_SHOWN])
    more = f", ... {len(runs)} runs" if len(runs) > _RUNS_SHOWN else ""
    return f"{sum(length for _, length in runs):,} tokens: {shown}{more}"
