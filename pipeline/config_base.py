"""What every command's model shares: strict types, nothing unknown, nothing that changes later.

In:   fields of a command (``config.py``, ``plan_config.py``)
Out:  the base of its model
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CommandConfig", "Count", "Flag", "Natural", "StrictModel", "Text"]

# Strict: pydantic would turn true into 1 and "8" into 8, and hide a slip of the pen.
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]


class StrictModel(BaseModel):
    """Base of the models: nothing unknown gets in, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CommandConfig(StrictModel):
    """Base of the commands' models."""

    arguments: ClassVar[dict[str, str]] = {}
    """Fields that are not ``--flags`` on the command line, as the user types them."""
    alternatives: ClassVar[tuple[frozenset[str], ...]] = ()
    """Groups of fields of which one is given: a flag replaces the whole group of the file."""

    @classmethod
    def on_command_line(cls, field: str) -> str:
        """Return how a user gives ``field`` on the command line."""
        return cls.arguments.get(field, "--" + field.replace("_", "-"))
