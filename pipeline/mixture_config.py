"""A mixture file: the corpora of a plan, their weights, a schedule, a curriculum.

In:   YAML or JSON, written by a user
Out:  ``Mixture`` (``planner/mixture.py``), or one line with field, value, rule and way out

    unit: tokens                    # or documents
    sources:
      web: {weight: 0.7, exhausted: repeat}
      code: 0.3                     # the same as {weight: 0.3}
    schedule:
      interpolation: linear         # or constant
      points:
        - {step: 1000, weights: {web: 0.5, code: 0.5}}
    curriculum:
      long_documents: defer         # or cut
      limits:
        - {step: 0, max_tokens: 2048}
        - {step: 500, max_tokens: null}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError, field_validator

from ringfeed.pipeline.config_base import Count, Natural, StrictModel
from ringfeed.pipeline.mixture_recipe import Interpolation, LengthLimit, LongDocuments, MixtureUnit
from ringfeed.pipeline.planner.mixture import Exhausted, Mixture, MixturePoint, MixtureSource
from ringfeed.pipeline.yaml_file import read_yaml, rule, short, suggest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MixtureConfig", "Weight", "read_mixture"]

Weight = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class SourceConfig(StrictModel):
    """One corpus."""

    weight: Weight
    exhausted: Exhausted = Exhausted.STOP
    epochs: Count | None = None


class PointConfig(StrictModel):
    """Weights from a step on."""

    step: Count
    weights: dict[str, Weight]


class ScheduleConfig(StrictModel):
    """Weights that change."""

    interpolation: Interpolation = Interpolation.CONSTANT
    points: Annotated[tuple[PointConfig, ...], Field(min_length=1)]


class LimitConfig(StrictModel):
    """The longest documents from a step on."""

    step: Natural
    max_tokens: Count | None


class CurriculumConfig(StrictModel):
    """Short documents first."""

    long_documents: LongDocuments = LongDocuments.DEFER
    limits: Annotated[tuple[LimitConfig, ...], Field(min_length=1)]


class MixtureConfig(StrictModel):
    """The whole file."""

    unit: MixtureUnit = MixtureUnit.TOKENS
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    schedule: ScheduleConfig | None = None
    curriculum: CurriculumConfig | None = None

    @field_validator("sources", mode="before")
    @classmethod
    def _number_is_weight(cls, sources: object) -> object:
        if not isinstance(sources, dict):
            return sources
        return {
            name: value if isinstance(value, dict | SourceConfig) else {"weight": value}
            for name, value in sources.items()
        }

    def to_mixture(self) -> Mixture:
        """Return what the planner takes; it has the rules between fields."""
        schedule, curriculum = self.schedule, self.curriculum
        return Mixture(
            unit=self.unit,
            sources=tuple(MixtureSource(name=name, **dict(source)) for name, source in self.sources.items()),
            interpolation=Interpolation.CONSTANT if schedule is None else schedule.interpolation,
            points=tuple(
                MixturePoint(step=point.step, weights=point.weights)
                for point in (() if schedule is None else schedule.points)
            ),
            limits=tuple(
                LengthLimit(step=limit.step, max_tokens=limit.max_tokens)
                for limit in (() if curriculum is None else curriculum.limits)
            ),
            long_documents=LongDocuments.DEFER if curriculum is None else curriculum.long_documents,
        )


def read_mixture(file: Path) -> Mixture:
    """Read a mixture file.

    Raises:
        ValueError: one line with field, value, rule and way out; every fault is in it.
    """
    body = read_yaml(file, what="mixture")
    if not isinstance(body, dict) or not body:
        known = ", ".join(MixtureConfig.model_fields)
        raise ValueError(f"mixture={str(file)!r} holds {short(body)}; it must hold {known}")
    try:
        return MixtureConfig.model_validate(body).to_mixture()
    except ValidationError as error:
        # A list is also called too short when what is in it is wrong.
        found = [e for e in error.errors() if e["type"] != "too_short" or not e["input"]]
        told = [_tell(detail["loc"], dict(detail)) for detail in found]
    except ValueError as error:
        told = [str(error)]
    raise ValueError(f"mixture={str(file)!r}: {' | '.join(told)}")


def _tell(place: tuple[int | str, ...], detail: dict[str, Any]) -> str:
    """Turn one of pydantic's findings into: field=value: rule."""
    field = ".".join(str(part) for part in place)
    if detail["type"] == "extra_forbidden":
        known = _fields_at(place[:-1])
        return f"{field}={short(detail['input'])}: no such key; {suggest(str(place[-1]), known)}"
    if detail["type"] == "missing":
        return f"{field} is not given"
    return f"{field}={short(detail['input'])}: {rule(detail)}"


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the part of the file at ``place`` may have."""
    inside: dict[str, type[StrictModel]] = {
        "sources": SourceConfig,
        "schedule": ScheduleConfig,
        "points": PointConfig,
        "curriculum": CurriculumConfig,
        "limits": LimitConfig,
    }
    names = [part for part in place if part in inside]
    model = inside[str(names[-1])] if names else MixtureConfig
    return list(model.model_fields)
