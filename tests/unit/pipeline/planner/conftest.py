"""Plans of lists of lengths, and their rows as plain Python."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.pipeline.planner.run import run_plan


@dataclass(frozen=True)
class Planned:
    plan: Plan
    report: PlanReport

    @property
    def steps(self):
        """Per step the packs, each a list of (document, start, length, epoch)."""
        return [packs_of(self.plan.step(i)) for i in range(self.plan.num_steps)]

    @property
    def packs(self):
        return [pack for step in self.steps for pack in step]

    @property
    def documents(self):
        """Document ids, pack by pack."""
        return [[piece[0] for piece in pack] for pack in self.packs]


def packs_of(table):
    columns = [table.column(name).to_pylist() for name in ("documents", "starts", "lengths", "epochs")]
    return [list(zip(*row, strict=True)) for row in zip(*columns, strict=True)]


@pytest.fixture
def plan_lengths(tmp_path):
    """Plan a list of lengths; options as ``PlanOptions``, with small defaults."""
    count = 0

    def make(lengths, **asked):
        nonlocal count
        count += 1
        file = tmp_path / f"lengths-{count}.npy"
        np.save(file, np.asarray(lengths, dtype=np.int64))
        defaults = {
            "pack_tokens": 10,
            "packs_per_step": 1,
            "balance": "best_fit",
            "output": tmp_path / f"plan-{count}",
        }
        if "max_cp" not in asked:
            defaults["pad_multiple"] = 1
        options = PlanOptions(**{**defaults, "lengths": file, **asked})
        report = run_plan(options)
        return Planned(Plan.open(Path(options.output)), report)

    return make
