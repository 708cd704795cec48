"""What counts as flat."""

from __future__ import annotations

from flat import BOUNDS, MIB, judge, quarters

STILL = dict.fromkeys(BOUNDS, 100 * MIB)


def met(samples: list[dict[str, int]]) -> dict[str, bool | None]:
    return {row.name: row.met for row in judge("it", "steps", samples)}


def unmet(samples: list[dict[str, int]]) -> set[str]:
    return {name for name, is_met in met(samples).items() if not is_met}


def growing(name: str, by: int) -> list[dict[str, int]]:
    """Forty samples; the last quarter is higher by that."""
    return [STILL] * 30 + [{**STILL, name: STILL[name] + by}] * 10


def test_what_does_not_change_is_flat() -> None:
    assert len(met([STILL] * 40)) == len(BOUNDS)
    assert unmet([STILL] * 40) == set()


def test_bytes_may_grow_by_a_hundredth_and_a_mebibyte() -> None:
    assert unmet(growing("resident_bytes", 2 * MIB)) == set()
    assert unmet(growing("resident_bytes", 2 * MIB + 1)) == {"soak_it_resident_bytes"}
    assert unmet(growing("resident_bytes", -50 * MIB)) == set()


def test_files_and_threads_may_not_change_at_all() -> None:
    for by in (-1, 1):
        assert unmet(growing("open_files", by)) == {"soak_it_open_files"}
        assert unmet(growing("threads", by)) == {"soak_it_threads"}


def test_the_start_is_not_judged_and_one_sample_decides_nothing() -> None:
    started = [dict.fromkeys(BOUNDS, 0)] * 10 + [STILL] * 30
    assert unmet(started) == set()
    assert unmet([*[STILL] * 39, dict.fromkeys(BOUNDS, 10**12)]) == set()


def test_too_few_samples_are_no_proof() -> None:
    assert unmet([STILL] * 7) == set(met([STILL] * 7))


def test_quarters_are_the_second_and_the_last() -> None:
    assert quarters(list(range(9))) == ([2, 3], [7, 8])
