"""How far a planner works ahead of its readers: pure arithmetic, without Ray and without a clock.

In:   the latest step that any rank asked for (``BuilderStats.highest_step``), and the steps planned so far
Out:  what to ask the planner for next (``PlannerActor.advance`` in ``workers/planner_actor.py``), if anything

Training starts with the first block of the plan. From then on the planner stays some steps ahead of the
fastest rank, and rests in between: a corpus that is never trained on to its end is never planned to its end.
"""

from __future__ import annotations

__all__ = ["DEFAULT_STEPS_AHEAD", "PlanAhead"]

DEFAULT_STEPS_AHEAD = 8192
"""Two full blocks of a plan: one is planned while another one is read."""


class PlanAhead:
    """Remembers how far readers and planner are."""

    def __init__(self, *, steps_ahead: int = DEFAULT_STEPS_AHEAD) -> None:
        """Know of no reader and no plan.

        Args:
            steps_ahead: steps that are planned beyond the latest one asked for.

        Raises:
            ValueError: if it is below 1.
        """
        if steps_ahead < 1:
            raise ValueError(f"steps_ahead={steps_ahead} must be at least 1")
        self._steps_ahead = steps_ahead
        self._asked = -1
        self._planned = 0
        self._is_finished = False

    def asked(self, step: int) -> None:
        """Note that a rank asked for ``step``; -1 is nobody. Earlier ones than before change nothing."""
        self._asked = max(self._asked, step)

    def planned(self, num_steps: int, *, is_finished: bool) -> None:
        """Note what the planner said last."""
        self._planned = num_steps
        self._is_finished = is_finished

    @property
    def until_step(self) -> int | None:
        """What to ``advance`` to: one block further, or None while there is enough, or nothing left.

        A block at a time, so that ranks may have each of them at once.
        """
        is_enough = self._planned > self._asked + self._steps_ahead
        return None if self._is_finished or is_enough else self._planned + 1
