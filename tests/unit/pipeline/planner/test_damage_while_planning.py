"""A byte that flips in a half-made plan is found before the plan is published, and planned again."""

import numpy as np
import pytest

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.planner.options import BlockLimits, Overflow, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.session import PlanSession
from ringfeed.pipeline.planner.snapshots import read_snapshot
from ringfeed.pipeline.verify import verify


@pytest.fixture
def options(tmp_path):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 70, size=400))
    return PlanOptions(
        lengths=tmp_path / "lengths.npy",
        output=tmp_path / "plan",
        pack_tokens=64,
        packs_per_step=2,
        pad_multiple=1,
        overflow=Overflow.DROP,
        block_limits=BlockLimits(steps=20),
    )


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) + at] ^= 1
    path.write_bytes(data)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["block-00000.arrow", "losses-00000.arrow", "snapshot-00002"])
def test_what_was_damaged_between_two_portions_is_named_and_never_published(options, tmp_path, name):
    run_plan(options)
    whole = content(options.output)
    options.output.rename(tmp_path / "whole")
    with PlanSession.open(options) as session:
        session.advance(until_step=60)
        damaged = tmp_path / "plan.partial" / name
        flip(damaged, damaged.read_bytes().index(b"ARROW1", 8) - 400)
        with pytest.raises(CorruptDataError, match=f"{damaged}.*run the same command again"):
            session.advance()
    assert not options.output.exists()

    run_plan(options)
    assert content(options.output) == whole
    assert verify(options.output).findings == ()


def test_a_snapshot_that_still_decodes_and_says_something_else_is_damaged(options):
    run_plan(options)
    path = options.output / "snapshot-00001"
    assert read_snapshot(path).first_step == 20
    path.write_bytes(path.read_bytes().replace(b'"first_step":', b'"first_stez":').replace(b'":1', b'":2'))
    with pytest.raises(CorruptDataError, match=f"{path} "):
        read_snapshot(path)
