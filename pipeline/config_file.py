"""From flags and a YAML file to a checked config, with errors a person can act on.

In:   flags that were given, and the command's section of ``--config run.yaml``
Out:  a model of ``config.py``

A file has one section per command, so that one file describes a whole run::

    ingest: {sources: [docs/], output: corpus}
    plan:   {corpora: [corpus], output: plan, pack_tokens: 8192, packs_per_step: 8, max_cp: 2}
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from ringfeed.pipeline.config import SECTIONS, CommandConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

__all__ = ["load_config", "read_sections"]

Model = TypeVar("Model", bound=CommandConfig)

# pydantic's names of what went wrong, in the words of the rest of ringfeed.
_RULES = {
    "int_type": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
    "dict_type": "must be made of `key: value` lines",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}


def load_config(model: type[Model], *, flags: Mapping[str, Any], file: Path | None) -> Model:
    """Return the config of one command: the file's section with ``flags`` on top.

    Args:
        model: one of the models in ``SECTIONS``.
        flags: field name to value; a value of None or an empty list was not given.
        file: the YAML file, or None.

    Raises:
        ValueError: one line with field, value, rule and way out; every fault is in it.
    """
    section = next(name for name, entry in SECTIONS.items() if entry is model)
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    from_file = {} if file is None else dict(read_sections(file).get(section, {}))
    for group in model.alternatives:
        if group & given.keys():
            # One of two ways to say a thing was given as a flag: it replaces the file's, whichever that is.
            from_file = {name: value for name, value in from_file.items() if name not in group}
    try:
        return model.model_validate({**from_file, **given})
    except ValidationError as error:
        told = [_tell(model, detail) for detail in error.errors()]
    where = f"{file}, section {section}: " if any(name not in given for name in from_file) else ""
    raise ValueError(where + " | ".join(told))


def read_sections(file: Path) -> dict[str, dict[str, Any]]:
    """Read a config file: section name to its keys. Unknown sections are refused.

    Raises:
        ValueError: if the file is missing, no YAML, or not made of known sections.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config={str(file)!r} cannot be read: {error}; give a YAML file") from None
    try:
        body = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config={str(file)!r} is no YAML: {reason}") from None
    if body is None:
        return {}
    if not isinstance(body, dict):
        known = ", ".join(SECTIONS)
        raise ValueError(f"{file} holds {_short(body)}; it must hold sections: {known}")  # noqa: TRY004
    for name, keys in body.items():
        if name not in SECTIONS:
            raise ValueError(
                f"{file}: section {name}={_short(keys)} is unknown; {_suggest(str(name), SECTIONS)}"
            )
        if not isinstance(keys, dict | None) or not all(isinstance(key, str) for key in keys or ()):
            raise ValueError(f"{file}: section {name}={_short(keys)} must be made of `key: value` lines")
    return {name: keys or {} for name, keys in body.items()}


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


def _tell(model: type[CommandConfig], detail: ErrorDetails) -> str:
    """Turn one of pydantic's findings into: field=value: rule; way out."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    field = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"{field}={_short(detail['input'])}: no such key; {_suggest(field, model.model_fields)}"
    way_out = f"{field} is {model.model_fields[field].description}"
    if detail["type"] == "missing":
        return (
            f"{field} is not given; pass {model.on_command_line(field)} or set it in the config ({way_out})"
        )
    text = f"{field}={_short(detail['input'])}: {_rule(detail)}"
    if detail["type"] in ("literal_error", "enum"):
        nearest = _nearest(str(detail["input"]), _choices(detail))
        return f"{text}; did you mean {nearest!r}?" if nearest else f"{text} ({way_out})"
    return f"{text}; {way_out}{_default(model, field)}"


def _rule(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind == "greater_than_equal":
        return f"must be at least {detail['ctx']['ge']}"
    if kind in ("literal_error", "enum"):
        return f"must be one of {', '.join(_choices(detail))}"
    return _RULES.get(kind, detail["msg"].lower())


def _choices(detail: ErrorDetails) -> list[str]:
    expected: str = detail["ctx"]["expected"]
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]


def _default(model: type[CommandConfig], field: str) -> str:
    value = model.model_fields[field].default
    return f", {value} by default" if isinstance(value, int) and not isinstance(value, bool) else ""


def _suggest(name: str, known: Iterable[str]) -> str:
    nearest = _nearest(name.replace("-", "_"), known)
    return f"did you mean {nearest!r}?" if nearest else f"known: {', '.join(known)}"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(name.lower(), list(known), n=1)
    return found[0] if found else None


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
