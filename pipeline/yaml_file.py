"""Read YAML a user wrote, and say what is wrong with it in ringfeed's words.

In:   a YAML file (JSON is YAML, too), and what pydantic finds wrong in it
Out:  plain Python values; the pieces of one-line errors (``config_file.py``, ``mixture_config.py``)
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

__all__ = ["choices", "nearest", "read_yaml", "rule", "short", "suggest"]

# pydantic's names of what went wrong, in the words of the rest of ringfeed.
_RULES = {
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "model_type": "must be made of `key: value` lines",
    "model_attributes_type": "must be made of `key: value` lines",
    "dict_type": "must be made of `key: value` lines",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def read_yaml(file: Path, *, what: str) -> object:
    """Return what ``file`` holds.

    Args:
        file: the file; keys that are there twice are refused.
        what: the argument that names it, for the error.

    Raises:
        ValueError: if it is missing, or no YAML.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{what}={str(file)!r} cannot be read: {error}; give a YAML file") from None
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}={str(file)!r} is no YAML: {reason}") from None


def rule(detail: ErrorDetails | Mapping[str, Any]) -> str:
    """Return the rule that was broken."""
    kind = detail["type"]
    if kind == "greater_than_equal":
        return f"must be at least {detail['ctx']['ge']:g}"
    if kind in ("literal_error", "enum"):
        return f"must be one of {', '.join(choices(detail))}"
    return _RULES.get(kind, detail["msg"].lower())


def choices(detail: ErrorDetails | Mapping[str, Any]) -> list[str]:
    """Return the words that would have been right."""
    expected: str = detail["ctx"]["expected"]
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the way out for an unknown name."""
    meant = nearest(name.replace("-", "_"), known)
    return f"did you mean {meant!r}?" if meant else f"known: {', '.join(known)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` looks like."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1)
    return found[0] if found else None


def short(value: object) -> str:
    """Return a value on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key replace an earlier one silently; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str | int) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is there twice; keep one", key_node.start_mark
                )
            if isinstance(key, str | int):
                seen.add(key)
        return super().construct_mapping(node, deep)
