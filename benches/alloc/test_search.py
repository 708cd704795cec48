"""The search for the smallest size that is enough."""

from __future__ import annotations

import pytest

from search import smallest_enough


@pytest.mark.parametrize("limit", range(0, 101))
def test_it_finds_what_trying_all_finds(limit: int) -> None:
    sizes = range(10, 91, 7)
    expected = next((size for size in sizes if size >= limit), None)
    assert smallest_enough(10, 90, 7, lambda size: size >= limit) == expected


def test_few_are_asked() -> None:
    asked: list[int] = []

    def is_enough(size: int) -> bool:
        asked.append(size)
        return size >= 600_000

    assert smallest_enough(0, 1 << 20, 1, is_enough) == 600_000
    assert len(asked) <= 22


def test_one_size_only() -> None:
    assert smallest_enough(5, 5, 3, lambda size: False) is None
    assert smallest_enough(5, 5, 3, lambda size: True) == 5
