"""The sweep of stalls: its table, and what becomes of the figures."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from rows import LOWER, Row
from stall_rows import (
    FAMILIES,
    OURS,
    PEERS,
    REPEATS,
    REPEATS_OF_PEERS,
    RUNS_MAX,
    Case,
    Measured,
    fill,
    keep,
    measure,
    read_cases,
    turns,
)

RATES = ("fast", "even", "slow")


def words(case: Case) -> dict[str, str]:
    return dict(word.split("=") for word in case.words.split(" "))


def a_measured(name: str, bound_ns: int, stalls: dict[str, list[int]], is_exact: bool = True):
    about = {"compute_ns": 1000 - bound_ns, "bound_ns": bound_ns, "is_exact": is_exact}
    about |= {"in_host": 1, "in_file": 0}
    run = {"total_ns": 1000, "share_of_others": 0, "slept_bytes": 1}
    runs = {policy: [run | {"stall_ns": it} for it in found] for policy, found in stalls.items()}
    return Measured(Case("small_host", name, ""), about, runs)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_sweeps_rates_and_caps_and_both_sizes_and_leads(family: str) -> None:
    names = [case.name.split("-") for case in read_cases() if case.family == family]
    for cap, rate in product(("third", "window"), RATES):
        assert any(name[:2] == [cap, rate] for name in names), (cap, rate)
    assert {name[2] for name in names} == {"equal", "uneven"}
    assert {name[3] for name in names} == {"short", "long"}


def test_cases_are_what_their_names_say() -> None:
    found = read_cases()
    assert {case.family for case in found} == set(FAMILIES)
    assert max(Counter((case.family, case.name) for case in found).values()) == 1
    for case in found:
        cap, rate, size, *_ = case.name.split("-")
        given = words(case)
        layers, sizes = int(given["layers"]), [int(n) for n in given["layer_kib"].split(":")]
        layer_kib = [sizes[at % len(sizes)] for at in range(layers)]
        room_kib = int(given["cap_kib"]) - int(given["hot_kib"])
        assert (len(set(layer_kib)) == 1) == (size == "equal"), case
        assert layers in (range(5, 7) if case.family.startswith("small") else range(24, 49)), case
        share = room_kib / sum(layer_kib)
        assert share == 1 if cap == "fits" else share < 0.35, case
        if cap == "window":
            assert int(given["cap_kib"]) <= 3.5 * sum(layer_kib) / layers, case
        link = "read_mb_s" if given["tiers"] == "direct" else "in_mb_s"
        back_us = sum(int(n) for n in given["backward_us"].split(":")) / len(sizes)
        load_us = sum(layer_kib) / layers * 1024 / int(given[link])
        expected = {"fast": load_us < 0.5 * back_us, "slow": load_us > 1.5 * back_us}
        assert expected.get(rate, 0.9 * back_us < load_us < 1.1 * back_us), (case, load_us)


def test_tiers_are_what_the_family_says() -> None:
    for case in read_cases():
        given = words(case)
        tiers = {"host": "host", "tiers": "three", "direct": "direct"}
        assert given["tiers"] == tiers[case.family.rsplit("_", 1)[1]]
        total_kib = int(given["layers"]) * max(int(n) for n in given["layer_kib"].split(":"))
        if given["tiers"] == "three":
            assert 0 < int(given["host_kib"]) < total_kib


def test_policies_run_in_turn_and_each_begins_as_often() -> None:
    order = list(turns())
    together = order[: 3 * REPEATS_OF_PEERS]
    rounds = [together[at : at + 3] for at in range(0, len(together), 3)]
    assert all(set(one) == {OURS, *PEERS} for one in rounds)
    assert {one[0] for one in rounds} == {OURS, *PEERS}
    assert order[len(together) :] == [OURS] * (REPEATS - REPEATS_OF_PEERS)


def test_a_case_is_asked_for_once_and_each_policy_as_often_as_it_may() -> None:
    asked: list[str] = []

    def ask(line: str) -> dict:
        asked.append(line)
        return {"line": line, "share_of_others": 0.01}

    measured = measure(Case("f", "c", "a=1 b=2"), ask)
    assert asked[0] == "case a=1 b=2"
    often = {OURS: REPEATS} | dict.fromkeys(PEERS, REPEATS_OF_PEERS)
    assert Counter(asked[1:]) == {f"run {policy}": times for policy, times in often.items()}
    assert measured.about["line"] == "case a=1 b=2"
    assert [run["line"] for run in measured.runs["on_demand"]] == ["run on_demand"] * 3


@pytest.mark.parametrize(("noisy", "made"), [(0, REPEATS), (2, REPEATS + 2), (99, RUNS_MAX)])
def test_ours_runs_until_enough_runs_were_calm(noisy: int, made: int) -> None:
    shares = iter([0.02] * noisy + [0.0] * RUNS_MAX)

    def ask(line: str) -> dict:
        return {"share_of_others": next(shares) if line == f"run {OURS}" else 1.0}

    measured = measure(Case("f", "c", ""), ask)
    assert len(measured.runs[OURS]) == made
    assert all(len(measured.runs[policy]) == REPEATS_OF_PEERS for policy in PEERS)


def test_the_calmest_runs_are_judged_however_they_went() -> None:
    one = a_measured("x", 0, {OURS: []})
    for at in range(2 * REPEATS):
        # The calmer half went worse.
        stall_ns = 20 if at % 2 else 5
        share = 0.01 * at + (0 if at % 2 else 1)
        run = {"stall_ns": stall_ns, "total_ns": 1000, "share_of_others": share}
        one.runs[OURS].append(run)
    assert one.over_bound(OURS) == pytest.approx(2)
    assert one.over_bound_of_all(OURS) == pytest.approx(1.25)
    assert one.of_step(OURS) == pytest.approx(0.02)


def test_a_stall_may_be_a_little_more_than_the_bound_and_a_little_of_the_step() -> None:
    one = a_measured("x", 200, {OURS: [110, 220, 9999]})
    assert one.allowed_ns == pytest.approx(1.05 * 200 + 10)
    assert one.over_bound(OURS) == pytest.approx(1.0)
    assert one.of_step(OURS) == pytest.approx(0.22)
    free = a_measured("x", 0, {OURS: [5]})
    assert free.over_bound(OURS) == pytest.approx(0.5)


def test_the_worst_case_of_each_policy_counts() -> None:
    row = Row("r", "ratio", LOWER, "how", bar=1)
    ahead, demand = PEERS
    first = a_measured("first", 0, {OURS: [5], ahead: [30], demand: [10]})
    second = a_measured("second", 0, {OURS: [8], ahead: [20], demand: [90]}, is_exact=False)
    fill(row, [first, second])
    assert row.ours == pytest.approx(0.8)
    assert row.peers == {ahead: pytest.approx(3), demand: pytest.approx(9)}
    assert "worst: second" in row.how
    assert "optimum in 1 of 2" in row.how
    assert "planned 0.7%" in row.how and "on_demand 5.0%" in row.how


def test_layers_that_did_not_sleep_meet_no_bar() -> None:
    stalls = dict.fromkeys((OURS, *PEERS), [0, 0])
    one = a_measured("awake", 0, stalls)
    one.runs[OURS][1]["slept_bytes"] = 0
    row = Row("r", "ratio", LOWER, "how", bar=1)
    fill(row, [a_measured("asleep", 0, stalls), one])
    assert row.met is False
    assert "no layer slept in awake" in row.how
    # The plan of this step keeps all layers.
    one.about["in_host"] = 0
    row = Row("r", "ratio", LOWER, "how", bar=1)
    fill(row, [one])
    assert row.met is True


def test_cases_of_an_earlier_run_stay(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "stall.json"
    keep([a_measured("first", 0, {OURS: [5]}), a_measured("second", 0, {OURS: [5]})], path)
    keep([a_measured("second", 0, {OURS: [7]})], path)
    kept = {one["case"]: one for one in json.loads(path.read_text())}
    assert list(kept) == ["first", "second"]
    assert kept["first"][OURS]["over_bound"] == pytest.approx(0.5)
    run = {"stall_ns": 7, "total_ns": 1000, "share_of_others": 0, "slept_bytes": 1}
    assert kept["second"][OURS]["runs"] == [run]
