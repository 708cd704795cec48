"""Prefixes that ranks exchange over gloo: exact gradients, unequal shares, errors on one rank.

The machinery is that of test_ranks_gloo.py. A hang is a failure.
"""

from __future__ import annotations

import models
import pytest
import ranks_cases
from ranks_cases import EXCHANGE_MUTANTS, EXCHANGES, FAILURES
from test_ranks_gloo import FP64_BOUND, RANKS_DIFFER, World, check_gradients


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("two"), "EXCHANGE_TWO")


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("three"), "EXCHANGE_THREE")


@pytest.mark.parametrize("name", EXCHANGES)
def test_gradients_are_the_dense_ones_of_all_ranks(name, two):
    check_gradients(two, name, "EXCHANGES")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["prompts of three ranks", "one rank without any", "two owners, each waiting"]
)
def test_gradients_are_the_dense_ones_of_three_ranks(name, three):
    check_gradients(three, name, "EXCHANGE_THREE")


@pytest.mark.parametrize("name", EXCHANGES)
def test_each_shared_token_is_computed_once(name, two):
    """What ranks computed and received, against the beginnings that both of them have."""
    reports = [result["report"].exchange for result in two.steps(name)]
    computed = sum(report.computed_tokens for report in reports)
    assert sum(report.received_tokens for report in reports) == computed
    assert computed == _shared_rows(ranks_cases.EXCHANGES[name])
    assert (sum(report.sent_bytes for report in reports) > 0) == (computed > 0)


def _shared_rows(case) -> int:
    """Rows of beginnings that stems of both ranks have, counted token by token; none beyond a
    first label of a tree that goes on in the same way."""
    stems, taken = [set(), set()], set()
    for rank in (0, 1):
        for batch in ranks_cases.groups_of(case, rank):
            for tokens, label in _stems(batch):
                stems[rank] |= {tuple(tokens[:n]) for n in range(1, len(tokens) + 1)}
                taken.add((*tokens, label))
    common = stems[0] & stems[1]
    common = {c for c in common if not any(c[:n] in taken for n in range(1, len(c) + 1))}
    # A beginning of n tokens has n - 1 rows.
    return len({c for c in common if len(c) > 1})


def _stems(batch):
    if hasattr(batch, "prompt"):
        return [(batch.prompt.tolist(), None)]
    found = []
    for each in batch.conversations:
        if each.used_tokens:
            tokens, first = each.tokens.tolist(), each.labels[0][0]
            found.append((tokens[:first], tokens[first]))
    return found


def test_exchanged_prefixes_sleep(two):
    for result in two.steps("an exchange, asleep"):
        report = result["report"]
        peaks = [each["asleep_bytes_peak"] for each in report.exchange.prefixes]
        assert all(peak > 1 << 20 for peak in peaks) and len(peaks) == (
            report.exchange.computed_tokens > 0
        )


def test_layers_of_exchanged_prefixes_that_stay_awake_are_noted(two):
    for result in two.steps("an exchange that stays awake"):
        report = result["report"].exchange
        noted = [note.split(": ")[1] for note in report.notes]
        layers = ranks_cases.SMALL["num_hidden_layers"]
        assert noted == ["layers stay awake"] * layers * (report.computed_tokens > 0)


def test_reports_of_groups_say_what_was_exchanged(two):
    for result in two.steps("the same prompt"):
        (report,) = result["report"].groups
        assert report.exchanged_prefixes == 1 and "exchanged: 1 prefix, " in str(report)
        assert "no prefix was shared" not in str(report)
    for result in two.steps("nothing in common"):
        assert result["report"].groups[0].exchanged_prefixes == 0


@pytest.mark.parametrize("name", EXCHANGE_MUTANTS)
def test_mutants_are_seen(name, two):
    wanted = ranks_cases.dense_gradients(EXCHANGE_MUTANTS[name])
    for result in two.steps(name):
        assert models.distance(result["gradients"], wanted) > 1e3 * FP64_BOUND


@pytest.mark.parametrize("name", FAILURES)
def test_an_error_of_one_rank_raises_on_every_rank(name, two):
    failed = int(name.split(" of rank ")[1][0])
    results = two.results(name)
    assert "ZeroDivisionError" in results[failed]["error"]
    assert RANKS_DIFFER in results[1 - failed]["error"]
    assert f"rank {failed} has 'ZeroDivisionError" in results[1 - failed]["message"]


@pytest.mark.slow
def test_ranks_that_do_not_all_exchange_are_refused(three):
    for result in three.results("rank 1 differs"):
        assert RANKS_DIFFER in result["error"]
        assert "ranks differ in exchange: ranks 0 2 have 'True', rank 1 has" in result["message"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_rank_that_dies_in_any_phase_is_an_error_of_the_other(where, tmp_path):
    world = World(tmp_path, f"DIES_IN_{where.upper()}")
    living, dead = world.results(f"a rank dies in its {where}")
    assert dead == {} and world.codes == [0, 3]
    assert "RuntimeError" in living["error"]


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_of_the_others(three):
    *living, dead = three.results("a rank dies in an exchange")
    assert dead == {}
    assert three.codes == [0, 0, 3]
    for result in living:
        assert "RuntimeError" in result["error"]
