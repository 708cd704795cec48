"""The row of simulated seconds."""

from __future__ import annotations

import pytest
import step_rows


class Learnt:
    """Simulates steps of a second."""

    def simulated(self, shape, *, asleep: bool) -> dict:
        return {"total_ns": 10**9}


@pytest.mark.parametrize(
    ("seconds", "met"), [([1.0, 1.05, 1.08], True), ([1.3] * 3, False), ([1.0, 3.0, 5.0], False)]
)
def test_repeats_that_lie_far_apart_meet_no_bar(seconds: list[float], met: bool) -> None:
    found = {shape: {"seconds": seconds} for shape in step_rows.HELD_OUT}
    row = step_rows._seconds(found, Learnt())
    assert row.met is met
