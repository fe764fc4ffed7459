"""From flags and a YAML file to a checked config, with errors a person can act on.

In:   flags that were given, and the command's section of ``--config run.yaml``
Out:  a model of ``config.py``

A file has one section per command, so that one file describes a whole run::

    ingest: {sources: [docs/], output: corpus}
    plan:   {corpora: [corpus], output: plan, pack_tokens: 8192, packs_per_step: 8, max_cp: 2}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from ringfeed.pipeline.config import SECTIONS, CommandConfig
from ringfeed.pipeline.yaml_file import choices, nearest, read_yaml, rule, short, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pydantic_core import ErrorDetails

__all__ = ["load_config", "read_sections"]

Model = TypeVar("Model", bound=CommandConfig)


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
    body = read_yaml(file, what="config")
    if body is None:
        return {}
    if not isinstance(body, dict):
        known = ", ".join(SECTIONS)
        raise ValueError(f"{file} holds {short(body)}; it must hold sections: {known}")  # noqa: TRY004
    for name, keys in body.items():
        if name not in SECTIONS:
            raise ValueError(
                f"{file}: section {name}={short(keys)} is unknown; {suggest(str(name), SECTIONS)}"
            )
        if not isinstance(keys, dict | None) or not all(isinstance(key, str) for key in keys or ()):
            raise ValueError(f"{file}: section {name}={short(keys)} must be made of `key: value` lines")
    return {name: keys or {} for name, keys in body.items()}


def _tell(model: type[CommandConfig], detail: ErrorDetails) -> str:
    """Turn one of pydantic's findings into: field=value: rule; way out."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    field = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"{field}={short(detail['input'])}: no such key; {suggest(field, model.model_fields)}"
    way_out = f"{field} is {model.model_fields[field].description}"
    if detail["type"] == "missing":
        return (
            f"{field} is not given; pass {model.on_command_line(field)} or set it in the config ({way_out})"
        )
    # Keys are named, places in a list are not.
    shown = ".".join([field, *(str(part) for part in detail["loc"][1:2] if isinstance(part, str))])
    text = f"{shown}={short(detail['input'])}: {rule(detail)}"
    if detail["type"] in ("literal_error", "enum"):
        meant = nearest(str(detail["input"]), choices(detail))
        return f"{text}; did you mean {meant!r}?" if meant else f"{text} ({way_out})"
    return f"{text}; {way_out}{_default(model, field)}"


def _default(model: type[CommandConfig], field: str) -> str:
    value = model.model_fields[field].default
    return f", {value} by default" if isinstance(value, int) and not isinstance(value, bool) else ""
