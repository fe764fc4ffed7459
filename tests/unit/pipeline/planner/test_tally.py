"""Sums of steps and blocks, through JSON and back."""

import json

import numpy as np

from ringfeed.pipeline.planner.tally import DISTANCES, BlockTally, count_distances


def test_no_block_adds_up_to_nothing():
    assert BlockTally.sum_of([]) == BlockTally()


def test_blocks_add_up_and_survive_json():
    one = BlockTally(packs=2, displacement_max=3, displacement_counts=(1, *[0] * (DISTANCES - 1)))
    two = BlockTally(packs=5, displacement_max=1, displacement_counts=(2, 4, *[0] * (DISTANCES - 2)))
    both = BlockTally.sum_of([one, two])
    assert (both.packs, both.displacement_max, both.displacement_counts[:3]) == (7, 3, (3, 4, 0))
    assert BlockTally.from_json(json.loads(json.dumps(both.to_json()))) == both


def test_distances_are_counted_per_step_and_together_from_64_on():
    counts = count_distances(np.array([0, 0, 2, 2]), np.array([0, 5, 64, 1000]), num_steps=3)
    assert counts.shape == (3, DISTANCES)
    assert (counts[0, 0], counts[0, 5], counts[2, 64]) == (1, 1, 2)
    assert counts.sum() == 4
