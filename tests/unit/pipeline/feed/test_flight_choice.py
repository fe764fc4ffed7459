"""Which feeder is asked next: near ones, then by hash, and not the one that has just failed."""

from ringfeed.pipeline.flight_choice import FeederChoice, FlightPatience, Troubles
from ringfeed.pipeline.flight_link import Failure, LinkError
from ringfeed.pipeline.flight_wire import Feeder

FEEDERS = [Feeder(url=f"grpc+tcp://10.0.0.{n}:1", host=f"host-{n}") for n in range(4)]


def choice(dp_rank=0, host=None, feeders=FEEDERS):
    made = FeederChoice("flight://directory:1", dp_rank=dp_rank, host=host)
    made.update(feeders)
    return made


def test_the_feeder_on_the_own_machine_comes_first_and_others_after_it_failed():
    near = choice(host="host-2")
    assert near.next() == FEEDERS[2].url
    near.is_bad(near.last)
    assert near.next() != FEEDERS[2].url
    near.is_good(str(FEEDERS[2].url))
    assert near.next() == FEEDERS[2].url


def test_cp_peers_choose_alike_and_dp_ranks_spread():
    taken = [choice(dp_rank).next() for dp_rank in range(32)]
    assert taken == [choice(dp_rank, feeders=FEEDERS[::-1]).next() for dp_rank in range(32)]
    assert set(taken) == {feeder.url for feeder in FEEDERS}


def test_when_all_have_failed_the_one_that_rested_longest_is_asked():
    made = choice()
    order = [made.next()]
    for _ in range(3):
        made.is_bad(made.last)
        order.append(made.next())
    made.is_bad(made.last)
    assert sorted(order) == sorted(str(feeder.url) for feeder in FEEDERS)
    assert not made.has_other()
    assert made.next() == order[0]


def test_a_directory_that_is_the_feeder_is_asked_at_its_own_url():
    assert choice(feeders=[Feeder(url=None)]).next() == "flight://directory:1"


def test_waits_double_up_to_a_bound_and_certificates_fail_after_three_tries():
    troubles = Troubles(FlightPatience(first_wait=0.1, most_wait=0.5), tls_seconds=0.0)
    waits = []
    for _ in range(4):
        troubles.add(LinkError(Failure.UNAVAILABLE, "gone"))
        waits.append(troubles.wait_seconds)
    assert waits == [0.1, 0.2, 0.4, 0.5]
    assert not troubles.are_final
    for is_final in (False, False, True):
        troubles.add(LinkError(Failure.TLS, "no"))
        assert troubles.are_final is is_final
    troubles.clear()
    assert (troubles.are_final, troubles.text(), troubles.seconds) == (False, "", 0.0)
    troubles.add(LinkError(Failure.TOKEN, "wrong"))
    assert troubles.are_final
