"""What Ray's errors mean to a pool: ask elsewhere, or give the user what the actor said."""

import threading

import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, ObjectStoreFullError, RayTaskError

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.workers.builder_calls import BuilderError, BuilderLostError
from ringfeed.workers.ray_builders import call_actor


def call(error):
    def start():
        raise error

    return call_actor(start, who="builder-3", seconds=1, stop=threading.Event())


def raised_in_an_actor(cause):
    return RayTaskError("block", "a traceback\nof many lines", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("the process has died\nand a page about it", None),
        ObjectLostError("ab" * 14, None, ""),
        ObjectStoreFullError("no room"),
        raised_in_an_actor(ObjectStoreFullError("no room")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_death_loss_and_want_of_memory_mean_to_ask_elsewhere(error):
    with pytest.raises(BuilderLostError, match=r"^builder-3: ") as raised:
        call(error)
    assert type(raised.value) is BuilderLostError
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "own", [ValueError("step 9 is not served"), CorruptDataError("document 7 is damaged")]
)
def test_what_the_builder_says_comes_as_it_is(own):
    with pytest.raises(type(own), match=f"^{own}$") as raised:
        call(raised_in_an_actor(own))
    assert type(raised.value) is type(own)


def test_any_other_error_of_a_builder_is_told_apart():
    with pytest.raises(BuilderError, match=r"^builder-3 failed: KeyError: 'x'$"):
        call(raised_in_an_actor(KeyError("x")))
