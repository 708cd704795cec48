"""Steps of several ranks over gloo: real processes, unequal shares, and what must be refused.

The ranks of a world run all of its cases one after the other (ranks_worker.py); a test looks at
what its case left. A hang is a failure: of the collective's own timeout, or of ``LIMIT_S``.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
import ranks_cases
import torch
from ranks_cases import MUTANTS, REFUSED, STEPS, THREE_RANKS

WORKER = Path(__file__).with_name("ranks_worker.py")
# For all cases of a world, on a busy machine.
LIMIT_S = 240
FP64_BOUND = 1e-10
FP32_BOUND = 1e-5

RANKS_DIFFER = "RanksDifferError"
UNSUPPORTED = "UnsupportedModelError"


class World:
    """The results of one world of ranks."""

    def __init__(self, directory: Path, cases: str):
        self._directory = directory
        self._cases = getattr(ranks_cases, cases)
        ranks = range(len(next(iter(self._cases.values())).shares))
        commands = [[sys.executable, WORKER, str(rank), directory, cases] for rank in ranks]
        logs = [(directory / f"log.{rank}").open("w+") for rank in ranks]
        workers = [
            subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            for command, log in zip(commands, logs, strict=True)
        ]
        deadline = time.monotonic() + LIMIT_S
        try:
            self.codes = [worker.wait(deadline - time.monotonic()) for worker in workers]
        except subprocess.TimeoutExpired:
            self.codes = [None for _ in ranks]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        self._logs = ""
        for log in logs:
            log.seek(0)
            self._logs += log.read()
            log.close()

    def results(self, name: str) -> list[dict]:
        """What each rank kept of a case; nothing of a rank that died in it."""
        found = []
        for rank in range(len(self.codes)):
            path = self._directory / f"{name}.{rank}"
            assert path.exists() or self.codes[rank] == 3, f"{name}: {self.codes}\n{self._logs}"
            found.append(torch.load(path, weights_only=False) if path.exists() else {})
        return found

    def steps(self, name: str) -> list[dict]:
        """The same, where every rank ran its step."""
        results = self.results(name)
        assert all("error" not in result for result in results), results
        return results


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("two"), "TWO_RANKS")


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("three"), "THREE_RANKS")


@functools.cache
def dense(case_name: str, cases: str) -> dict[str, torch.Tensor]:
    return ranks_cases.dense_gradients(getattr(ranks_cases, cases)[case_name])


def check_gradients(world: World, name: str, cases: str) -> None:
    case = getattr(ranks_cases, cases)[name]
    wanted = dense(name, cases)
    if case.altered == "two steps":
        wanted = {n: 2 * gradient for n, gradient in wanted.items()}
    for result in world.steps(name):
        if not wanted:
            assert result["gradients"] == {}
            continue
        bound = FP32_BOUND if case.spread == "FP32" else FP64_BOUND
        assert models.distance(result["gradients"], wanted) <= bound


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_the_dense_ones_of_all_ranks(name, two):
    check_gradients(two, name, "STEPS")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two groups, one, none", "ddp of three"])
def test_gradients_are_the_dense_ones_of_three_ranks(name, three):
    check_gradients(three, name, "THREE_RANKS")


@pytest.mark.parametrize("name", STEPS)
def test_every_rank_enters_the_same_collectives(name, two):
    first, second = (result["collectives"] for result in two.steps(name))
    assert first == second


@pytest.mark.parametrize(
    ("name", "reductions"),
    [
        # One for each layer and one for the rest, whatever the number of microbatches.
        ("unequal", 4),
        ("five microbatches against one", 4),
        ("one empty share", 4),
        ("only the model as a whole", 1),
        ("only the head is trained", 1),
        ("no groups at all", 0),
    ],
)
def test_gradients_are_reduced_once(name, reductions, two):
    for result in two.steps(name):
        calls = [call for call, _ in result["collectives"]]
        assert sum(call.startswith("reduce_scatter") for call in calls) == reductions
        assert "all_reduce" not in calls


def test_two_messages_settle_a_step_and_a_third_a_budget(two):
    for name, messages in (
        ("five microbatches against one", 2),
        ("the smaller budget on both", 2),
        ("a smaller budget on one rank", 3),
    ):
        calls = [call for call, _ in two.steps(name)[0]["collectives"]]
        assert calls.count("all_gather") == messages


def test_a_smaller_budget_counts_for_everybody_and_changes_no_pass(two):
    differing = two.steps("a smaller budget on one rank")
    equal = two.steps("the smaller budget on both")
    for result, other in zip(differing, equal, strict=True):
        assert result["report"].microbatch_tokens == other["report"].microbatch_tokens == 5
        passes, others = (
            [call for call in each["collectives"] if call[0] != "all_gather"]
            for each in (result, other)
        )
        assert passes == others


def test_dummies_fill_the_smaller_share_and_count_for_nothing(two):
    large, small = (result["report"] for result in two.steps("unequal"))
    assert (large.dummy_microbatches, large.dummy_groups) == (0, 0)
    assert small.dummy_groups == 2
    microbatches = sum(report.counts["microbatches"] for report in large.groups)
    assert small.dummy_microbatches == microbatches - 1
    (only,) = small.groups
    assert (only.counts["microbatches"], only.counts["microbatch_tokens"]) == (1, 1)
    large, small = (result["report"] for result in two.steps("five microbatches against one"))
    assert (large.groups[0].counts["microbatches"], small.groups[0].counts["microbatches"]) == (
        5,
        1,
    )
    assert (small.dummy_microbatches, small.dummy_groups) == (4, 0)
    assert two.steps("one empty share")[1]["report"].loss == 0.0


@pytest.mark.parametrize("name", ["ddp, one empty share", "plain"])
def test_whole_weights_need_no_dummies(name, two):
    for result in two.steps(name):
        assert result["report"].dummy_microbatches == result["report"].dummy_groups == 0


def test_reports_come_in_the_order_of_the_groups(two):
    """The turns are in another order: the group with the most microbatches first."""
    prompts = [prompt for prompt, _, _ in STEPS["unequal"].shares[0]]
    report = two.steps("unequal")[0]["report"]
    assert [each.counts["prefix_tokens"] for each in report.groups] == [p - 1 for p in prompts]


def test_residency_differs_by_rank(two):
    asleep, awake = (result["report"] for result in two.steps("one rank sleeps"))
    assert asleep.groups[0].prefix["asleep_bytes_peak"] > 1 << 20
    assert awake.groups[0].prefix["asleep_bytes_peak"] == 0


def test_a_probe_of_one_rank_is_run_by_all(two):
    """Its gradients are pulled by the first layer's weights, which are there for the pass only."""
    parameters = len(
        list(ranks_cases.model_of(STEPS["one rank sleeps"]).model.layers[0].parameters())
    )
    for result in two.steps("one rank sleeps"):
        assert result["probes"] == [parameters]


@pytest.mark.parametrize(
    "name", ["both sleep, weights gathered", "both sleep, weights gathered since the probe"]
)
def test_gathered_weights_never_sleep(name, two):
    for result in two.steps(name):
        assert result["report"].groups[0].prefix["asleep_bytes_peak"] > 1 << 20
        assert set(result["roles"]) == {"none"}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name, two):
    wanted = ranks_cases.dense_gradients(MUTANTS[name])
    for result in two.steps(name):
        assert models.distance(result["gradients"], wanted) > 1e3 * FP64_BOUND


# Of each refusal: the error's type, and words of it, by rank.
_FROZEN = (RANKS_DIFFER, "ranks differ in parameters: rank 0 has")
_SPREAD = (RANKS_DIFFER, "ranks differ in weights: rank 0 has 'fully_shard of the model")
_PASSES = (RANKS_DIFFER, "ranks differ in passes of the step: rank 0 has '11 passes")
_ALONE = (UNSUPPORTED, "accepted: step() with this rank's groups")
_ATTENTION = (UNSUPPORTED, "fully_shard of 'model.layers.0.self_attn'")
_LAYERS = (UNSUPPORTED, "but not to the model itself")
_LEFT_OUT = (UNSUPPORTED, "'model.norm.weight' is on no mesh")
_FLATTENED = (UNSUPPORTED, "FullyShardedDataParallel")
_GROUP = (UNSUPPORTED, "on a mesh of 2 ranks and the step's process group has 1")
_PROMPT = (UNSUPPORTED, "accepted under fully_shard: logits and outputs of responses")
_READ = (RANKS_DIFFER, "ranks differ in losses read: rank 0 has")
REFUSALS = {
    "other parameters are trained": [_FROZEN, _FROZEN],
    "other spread": [_SPREAD, _SPREAD],
    "one rank cannot": [
        (RANKS_DIFFER, "rank 1 has \"UnsupportedModelError: dropout 0.25 in 'model.layers.1"),
        (UNSUPPORTED, "dropout 0.25 in 'model.layers.1.extra'"),
    ],
    "one rank cannot, and says so at length": [
        (
            RANKS_DIFFER,
            "rank 1 has \"UnsupportedModelError: dropout 0.25 in 'model.layers.1.\U0001f4a4",
        ),
        (UNSUPPORTED, "\U0001f4a4" * 2000),
    ],
    "one rank's groups can be read once": [
        (RANKS_DIFFER, "rank 1 has 'TypeError: groups is a generator; accepted: a list"),
        ("TypeError", "groups is a generator; accepted: a list of Group"),
    ],
    "no dummy microbatches": [_PASSES, _PASSES],
    "no dummy microbatches on one rank": [_PASSES, _PASSES],
    "backward alone": [_ALONE, _ALONE],
    "backward alone, ddp": [_ALONE, _ALONE],
    "attention as a whole": [_ATTENTION, _ATTENTION],
    "layers but not the model": [_LAYERS, _LAYERS],
    "a weight left out": [_LEFT_OUT, _LEFT_OUT],
    "flattened": [_FLATTENED, _FLATTENED],
    "a group of one rank": [_GROUP, _GROUP],
    "a loss of the prompt": [_PROMPT, _PROMPT],
    "a loss of the prompt on one rank": [_READ, _READ],
    "one rank asks for no output": [
        (RANKS_DIFFER, "rank 1 has \"ArgumentError: outputs has 'attentions'"),
        ("ArgumentError", "outputs has 'attentions'; accepted: a list of"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_on_every_rank(name, two):
    for result, (kind, words) in zip(two.results(name), REFUSALS[name], strict=True):
        assert kind in result["error"]
        assert words in result["message"]


@pytest.mark.slow
def test_a_rank_that_stays_away_is_a_timeout(three):
    *waiting, away = three.results("a rank stays away")
    assert away["error"][0] == "InterruptedError"
    for result in waiting:
        assert "RuntimeError" in result["error"]
        assert "imed out" in result["message"]


@pytest.mark.slow
def test_a_rank_that_dies_is_an_error_of_the_others(three):
    *living, dead = three.results("a rank dies")
    assert dead == {}
    assert three.codes == [0, 0, 3]
    for result in living:
        assert "RuntimeError" in result["error"]
        assert RANKS_DIFFER not in result["error"]
    assert list(THREE_RANKS)[-1] == "a rank dies"
