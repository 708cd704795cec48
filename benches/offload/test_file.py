"""The row of what checksums cost."""

from __future__ import annotations

import pytest
from file_rows import put_cost
from rows import LOWER, Row


@pytest.mark.parametrize(
    ("write", "read", "met"), [(0.05, 0.06, True), (0.05, 0.2, False), (0.05, 0.0, False)]
)
def test_checksums_that_cost_nothing_meet_no_bar(write: float, read: float, met: bool) -> None:
    row = Row("checksum_cpu_s_per_gb", "s/GB", LOWER, "how", bar=0.1)
    put_cost(row, {"write": write, "read": read})
    assert row.met is met
