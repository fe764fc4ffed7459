"""Mixture files: what they may say, and how a slip of the pen is told."""

import json

import pytest

from ringfeed.pipeline.mixture_config import read_mixture
from ringfeed.pipeline.mixture_recipe import Interpolation, LengthLimit, LongDocuments, MixtureUnit
from ringfeed.pipeline.planner.mixture import Exhausted, Mixture, MixturePoint, MixtureSource

WHOLE = """
unit: documents
sources:
  web: {weight: 0.7, exhausted: repeat}
  code: {weight: 0.2, exhausted: drop, epochs: 2}
  books: 0.1
schedule:
  interpolation: linear
  points:
    - {step: 1000, weights: {web: 0.5, code: 0.3, books: 0.2}}
curriculum:
  long_documents: cut
  limits:
    - {step: 0, max_tokens: 2048}
    - {step: 500, max_tokens: null}
"""


def written(tmp_path, text):
    file = tmp_path / "mixture.yaml"
    file.write_text(text)
    return file


def test_a_file_says_all_that_a_mixture_has(tmp_path):
    assert read_mixture(written(tmp_path, WHOLE)) == Mixture(
        unit=MixtureUnit.DOCUMENTS,
        sources=(
            MixtureSource(name="web", weight=0.7, exhausted=Exhausted.REPEAT),
            MixtureSource(name="code", weight=0.2, exhausted=Exhausted.DROP, epochs=2),
            MixtureSource(name="books", weight=0.1),
        ),
        interpolation=Interpolation.LINEAR,
        points=(MixturePoint(step=1000, weights={"web": 0.5, "code": 0.3, "books": 0.2}),),
        limits=(LengthLimit(step=0, max_tokens=2048), LengthLimit(step=500, max_tokens=None)),
        long_documents=LongDocuments.CUT,
    )


def test_json_will_do(tmp_path):
    file = written(tmp_path, json.dumps({"sources": {"web": 7, "code": {"weight": 3}}}))

    assert [source.weight for source in read_mixture(file).sources] == [7, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"holds None; it must hold unit, sources, schedule, curriculum"),
        ("- 1", r"holds \[1\]; it must hold"),
        ("sources: {web: -1}", r"sources.web.weight=-1: must be at least 0"),
        ("sources: {web: '1'}", r"sources.web.weight='1': must be a number"),
        ("sources: {web: true}", r"sources.web.weight=True: must be a number"),
        ("sources: {web: .inf}", r"sources.web.weight=inf: must be finite"),
        ("sources: {web: 0}", r"the weights at step 0 sum to 0"),
        ("sources: {web: {weight: 1, exhausted: again}}", r"exhausted='again': must be one of repeat, "),
        ("sources: {web: {exhausted: stop}}", r"sources.web.weight is not given"),
        ("sources: {web: {weight: 1, wieght: 2}}", r"web.wieght=2: no such key; did you mean 'weight'"),
        ("source: {web: 1}", r"source=\{'web': 1\}: no such key; did you mean 'sources'"),
        ("sources: {web: 1, web: 2}", r"is no YAML: .*key 'web' is there twice"),
        ("sources: [web]", r"sources=\['web'\]: must be made of `key: value` lines"),
        ("sources: {web: 1}\nschedule: {points: []}", r"schedule.points=\[\]: must not be empty"),
        (
            "sources: {web: 1}\nschedule: {points: [{step: 0, weights: {web: 1}}]}",
            r"schedule.points.0.step=0: must be at least 1",
        ),
        ("curriculum: {limits: [{step: 0, max_tokens: 0}]}", r"limits.0.max_tokens=0: must be at least 1"),
        ("curriculum: {limits: [{step: 0}]}", r"curriculum.limits.0.max_tokens is not given"),
        ("curriculum: {limits: [{step: 0, max_token: 3}]}", r"did you mean 'max_tokens'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_in_one_line_with_field_and_value(tmp_path, text, message):
    with pytest.raises(ValueError, match=r"mixture='.*mixture.yaml'.*" + message) as raised:
        read_mixture(written(tmp_path, text))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"mixture='.*no.yaml' cannot be read"):
        read_mixture(tmp_path / "no.yaml")
