"""Mixtures as a user asks for them: what is refused, and what they come to."""

import pytest

from ringfeed.pipeline.mixture_recipe import WEIGHT_UNIT, Interpolation, LengthLimit
from ringfeed.pipeline.planner.mixture import (
    Exhausted,
    Mixture,
    MixturePoint,
    MixtureSource,
    resolve_mixture,
)
from ringfeed.pipeline.recipe import SourceRef


def corpora(**counts):
    return [
        SourceRef(kind="corpus", name=name, fingerprint="", num_documents=count)
        for name, count in counts.items()
    ]


def sources(**weights):
    return tuple(MixtureSource(name=name, weight=weight) for name, weight in weights.items())


def with_policies(**policies):
    return Mixture(sources=tuple(MixtureSource(name=n, weight=1, exhausted=p) for n, p in policies.items()))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sources": sources(web=0, code=0)}, r"weights at step 0 sum to 0.*give at least one source"),
        ({"sources": sources(web=-1)}, r"source 'web' has weight=-1 at step 0; must be at least 0"),
        ({"sources": sources(web=float("nan"))}, r"weight=nan"),
        ({"sources": sources(web=float("inf"))}, r"weight=inf"),
        ({"sources": sources(web=1) * 2}, r"names source 'web' twice"),
        ({"points": (MixturePoint(step=1, weights={}),)}, r"a schedule of weights needs sources"),
        ({"limits": (LengthLimit(step=0, max_tokens=0),)}, r"max_tokens=0 at step 0; must be at least 1"),
        (
            {"limits": (LengthLimit(step=5, max_tokens=9), LengthLimit(step=5, max_tokens=8))},
            r"curriculum: step 5 comes after step 5; steps must rise",
        ),
        ({"sources": (MixtureSource(name="web", weight=1, epochs=0),)}, r"epochs=0; must be at least 1"),
    ],
    ids=["zero", "negative", "nan", "inf", "twice", "nothing-to-schedule", "limit-0", "steps", "epochs"],
)
def test_what_makes_no_sense_is_refused_with_a_way_out(asked, message):
    with pytest.raises(ValueError, match=message):
        Mixture(**asked)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(0, {"web": 1, "code": 1})], r"schedule: step 0 comes after step 0; steps must rise"),
        ([(4, {"web": 1})], r"schedule at step 4 gives no weight to source 'code'"),
        ([(4, {"web": 1, "cod": 1})], r"schedule at step 4 names source 'cod'.*did you mean 'code'"),
        ([(4, {"web": 0, "code": 0})], r"weights at step 4 sum to 0"),
        ([(4, {"web": -2, "code": 3})], r"source 'web' has weight=-2 at step 4"),
    ],
)
def test_every_point_of_a_schedule_is_checked(points, message):
    with pytest.raises(ValueError, match=message):
        Mixture(
            sources=sources(web=1, code=1),
            points=tuple(MixturePoint(step=step, weights=weights) for step, weights in points),
        )


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"web": 1}, r"gives no weight to source 'code'; name every source, with 0 to leave one out"),
        ({"web": 1, "code": 1, "cod": 1}, r"names source 'cod', which is none of the plan's; did you mean"),
        ({"web": 1, "code": 1, "empty": 1}, r"source 'empty' has a weight but no document"),
    ],
)
def test_a_mixture_that_does_not_fit_its_corpora_is_refused(named, message):
    present = corpora(web=5, code=5) if "empty" not in named else corpora(web=5, code=5, empty=0)
    with pytest.raises(ValueError, match=message):
        resolve_mixture(Mixture(sources=sources(**named)), present, epochs=1)


def test_weights_follow_the_order_of_the_corpora_not_of_the_mixture():
    mixture = Mixture(sources=sources(code=1, web=3))
    resolved = resolve_mixture(mixture, corpora(web=5, code=5), epochs=1)

    assert resolved.recipe.points[0].weights == (WEIGHT_UNIT * 3 // 4, WEIGHT_UNIT // 4)


def test_where_a_plan_ends_is_no_part_of_its_recipe():
    asked = {policy: with_policies(web=policy, code="stop") for policy in ("stop", "repeat", "drop")}
    recipes = {p: resolve_mixture(m, corpora(web=5, code=5), epochs=2).recipe for p, m in asked.items()}

    assert recipes["stop"] == recipes["repeat"] != recipes["drop"]
    assert recipes["drop"].drops_after == (2, None)


def test_a_source_has_its_own_epochs_or_the_plan_s():
    mixture = Mixture(
        sources=(MixtureSource(name="web", weight=1, epochs=5), MixtureSource(name="code", weight=1))
    )

    assert resolve_mixture(mixture, corpora(web=5, code=5), epochs=2).stops_after == (5, 2)


@pytest.mark.parametrize(
    ("policies", "ends"),
    [
        (("repeat", "repeat"), False),
        (("repeat", "drop"), False),
        (("drop", "drop"), True),
        (("stop", "repeat"), True),
    ],
)
def test_a_mixture_knows_whether_it_ends(policies, ends):
    mixture = with_policies(**dict(zip(("web", "code"), policies, strict=True)))

    assert resolve_mixture(mixture, corpora(web=5, code=5), epochs=1).ends is ends


def test_a_source_that_is_never_drawn_again_ends_nothing():
    mixture = Mixture(
        sources=(
            MixtureSource(name="web", weight=1),
            MixtureSource(name="code", weight=1, exhausted=Exhausted.REPEAT),
        ),
        points=(MixturePoint(step=9, weights={"web": 0, "code": 1}),),
    )

    assert not resolve_mixture(mixture, corpora(web=5, code=5), epochs=1).ends


def test_new_weights_keep_the_policies_and_drop_the_schedule():
    mixture = Mixture(
        sources=(
            MixtureSource(name="web", weight=1, exhausted=Exhausted.DROP, epochs=3),
            *sources(code=1),
        ),
        points=(MixturePoint(step=9, weights={"web": 0, "code": 1}),),
        limits=(LengthLimit(step=0, max_tokens=7),),
    )
    changed = mixture.with_weights({"code": 3, "web": 2})

    assert changed.sources[0] == MixtureSource(name="web", weight=2, exhausted=Exhausted.DROP, epochs=3)
    assert (changed.points, changed.limits) == ((), mixture.limits)
    with pytest.raises(ValueError, match="gives no weight to source 'code'"):
        mixture.with_weights({"web": 2})


def test_a_mixture_comes_back_from_json():
    mixture = Mixture(
        sources=(MixtureSource(name="web", weight=0.5, exhausted=Exhausted.REPEAT, epochs=2),),
        interpolation=Interpolation.LINEAR,
        points=(MixturePoint(step=9, weights={"web": 1.0}),),
        limits=(LengthLimit(step=0, max_tokens=7), LengthLimit(step=1, max_tokens=None)),
    )

    assert Mixture.from_json(mixture.to_json()) == mixture
