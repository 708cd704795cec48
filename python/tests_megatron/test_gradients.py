"""Gradients of Megatron's schedule with shared prompts beside those without, on one and two ranks
over gloo (docs/method.md §10)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from rank_workers import run_ranks

import cases
import counted
import expert_counts
from dormouse.demo import gradcheck
from models import distance

WORKER = Path(__file__).with_name("worker.py")
WORKER_SECONDS_MAX = 3600
EXACT = 1e-10
# Of the losses that are logged.
TOLERANCE, TOLERANCE_LOW = 1e-5, 0.05
OF_DTYPES = [
    (name, dtype)
    for dtype in cases.CALLS_OF
    for name, case in cases.CASES.items()
    if dtype is torch.float64 or case.is_rounded
]
# Of each call: rows with a response, and different prompts.
ROWS, PROMPTS = 5, 2
WAYS = ("plain", "shared")
# Position and tokens of a prompt that has no row of the trainer's.
DUMMY = (0, (0,))


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Returns a function that returns what each rank left of a case."""
    runs: dict[tuple, list[dict]] = {}

    def of_case(name: str, dtype: torch.dtype) -> list[dict]:
        ranks = cases.CASES[name].ranks
        if (ranks, dtype) not in runs:
            directory = tmp_path_factory.mktemp("ranks")
            arguments = (directory, str(dtype).removeprefix("torch."))
            codes = run_ranks(WORKER, *arguments, ranks=ranks, seconds_max=WORKER_SECONDS_MAX)
            assert codes == [0] * ranks
            # The counts are an object of ours.
            files = [directory / f"{rank}.pt" for rank in range(ranks)]
            runs[ranks, dtype] = [torch.load(each, weights_only=False) for each in files]
        return [of_rank[name] for of_rank in runs[ranks, dtype]]

    return of_case


@pytest.mark.parametrize("name, dtype", OF_DTYPES, ids=str)
def test_gradients_are_those_of_megatron(run_of, name, dtype):
    for found in run_of(name, dtype):
        ways = (found[way]["gradients"] for way in ("truth", "plain", "shared"))
        calls = list(zip(*ways, strict=True))
        assert len(calls) == cases.CASES[name].of_dtype(dtype).calls
        if dtype is torch.float64:
            assert all(distance(ours, exact) < EXACT for exact, _, ours in calls)
            continue
        runs = [gradcheck.distances_of(exact.items(), *others) for exact, *others in calls]
        error = gradcheck.compare_runs(runs)
        assert error.dense_global > 0, "the truth is no other run"
        assert error.within_bounds, error


@pytest.mark.parametrize("name, dtype", OF_DTYPES, ids=str)
def test_what_is_logged_is_that_of_megatron(run_of, name, dtype):
    of_ranks = run_of(name, dtype)
    logged_of = {
        way: [_logged(found[way]["losses"]) for found in of_ranks] for way in WAYS
    }
    # All but the last stage log nothing.
    assert any(len(each) for each in logged_of["plain"])
    for logged in zip(*logged_of.values(), strict=True):
        tolerance = TOLERANCE_LOW if dtype is torch.bfloat16 else TOLERANCE
        torch.testing.assert_close(*logged, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", cases.CASES)
def test_prompts_pass_through_the_layers_once(run_of, name):
    """Forward and backward in each part of the model; forward twice where no graph is kept."""
    of_ranks, case = run_of(name, torch.float64), cases.CASES[name]
    times = {counted.FORWARD: case.prompt_forwards, counted.BACKWARD: 1}
    for call, direction, part in itertools.product(range(cases.CALLS), times, range(case.chunks)):
        of_call = [
            (found["shared"]["passes"][call], found["shared"]["rollouts"][call])
            for found in of_ranks
        ]
        prompts = {prompt for _, rollouts in of_call for prompt in rollouts}
        ran_on_any = set()
        for passes, rollouts in of_call:
            pieces = {
                (piece.first, piece.tokens): count
                for piece, count in passes.of_prompts[direction].items()
                if piece.part == part
            }
            assert set(pieces.values()) == {times[direction]}
            ran = _taken(pieces, prompts)
            # Replicas may run prompts of each other.
            assert case.is_across or ran == set(rollouts)
            # The only other piece may be the dummy that a rank without rows runs.
            assert pieces.keys() <= {DUMMY}
            ran_on_any |= ran
            if case.has_all_rows:
                rows = times[direction] * sum(rollouts.values())
                assert passes.of_others[direction][part] == rows
        assert ran_on_any == prompts


@pytest.mark.parametrize("name", cases.CASES)
def test_prompts_run_once_and_nothing_stays_asleep(run_of, name):
    of_ranks, case = run_of(name, torch.float64), cases.CASES[name]
    sharing = [found["shared"]["sharing"] for found in of_ranks]
    # Where experts are balanced, a row without a loss counts too.
    more = case.is_balanced
    rows, prompts = ((count + more) * cases.CALLS for count in (ROWS, PROMPTS))
    if case.is_across:
        # Replicas run rows of each other. Two halves of all rows share one prompt at most.
        assert sum(each.rows for each in sharing) == rows * len(sharing)
        assert sum(each.prompts for each in sharing) < prompts * len(sharing)
    else:
        assert all(each.rows == rows for each in sharing)
        more = {0, cases.CALLS} if case.has_third else {0}
        assert {each.prompts - prompts for each in sharing} == more
    assert all(found["shared"]["open"] == 0 for found in of_ranks)


@pytest.mark.parametrize("name", [
    name for name, case in cases.CASES.items() if case.prompt_tokens == cases.LONG_TOKENS
])
def test_long_prompts_sleep(run_of, name):
    """All layers of a part of the model, the last one too."""
    of_ranks, case = run_of(name, torch.float64), cases.CASES[name]
    slept = [[layers for size, layers in found["shared"]["asleep"] if size] for found in of_ranks]
    assert {layers for each in slept for layers in each} == {case.layers}
    counts = list(map(len, slept))
    prompts = PROMPTS * cases.CALLS * case.chunks
    if case.is_across:
        # Each prompt is on one replica.
        assert min(counts) > 0 and sum(counts) >= prompts
    else:
        assert min(counts) >= prompts


@pytest.mark.parametrize("name", [name for name, case in cases.CASES.items() if case.is_balanced])
def test_experts_are_balanced_as_in_megatron(run_of, name):
    """Losses that are logged, tokens per expert, and biases."""
    of_ranks, case = run_of(name, torch.float64), cases.CASES[name]
    # Ranks of a stage follow each other.
    of_stage = len(of_ranks) // case.stages
    compared = 0
    for call, stage in itertools.product(range(cases.CALLS), range(case.stages)):
        own = of_ranks[stage * of_stage : (stage + 1) * of_stage]
        plain, shared = ([found[way]["balance"][call] for found in own] for way in WAYS)
        assert expert_counts.differing(plain, shared) == []
        # A stage without experts has nothing.
        compared += len(plain[0])
    assert compared >= cases.CALLS


@pytest.mark.parametrize("name", [
    name
    for name, case in cases.CASES.items()
    if case.stages > 1 and case.context_parallel == 1
])
def test_stages_send_what_is_planned(run_of, name):
    for found in run_of(name, torch.float64):
        assert len(found["shared"]["bytes"]) == cases.CALLS
        for planned, sent in found["shared"]["bytes"]:
            # Every stage sends: the first hidden states, the last gradients.
            assert planned == sent > 0


@pytest.mark.parametrize(
    "name", [name for name, case in cases.CASES.items() if case.context_parallel > 1]
)
def test_context_parallel_ranks_send_what_is_planned(run_of, name):
    for found in run_of(name, torch.float64):
        # Of each prompt one forward at least, and the backward; of a stage its list.
        assert len(found["shared"]["bytes"]) >= 2 * PROMPTS * cases.CALLS
        for planned, sent in found["shared"]["bytes"]:
            assert planned == sent > 0


@pytest.mark.parametrize("name", [name for name, case in cases.CASES.items() if case.ring])
def test_context_parallel_ranks_hold_what_is_planned(run_of, name):
    for found in run_of(name, torch.float32):
        # The forward holds K and V alone.
        assert all(0 < held <= planned for planned, held in found["shared"]["held"])
        assert any(held == planned for planned, held in found["shared"]["held"])


def _taken(pieces: dict[tuple, int], prompts: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Takes the pieces of prompts out; returns the prompts that they make up."""
    found, taken = set(), set()
    for prompt in prompts:
        end, own = 0, []
        # The last token runs with the responses.
        while end < len(prompt) - 1:
            fitting = [
                piece for first, piece in pieces
                if first == end and piece == prompt[end : end + len(piece)]
            ]
            # A short prompt may begin another one.
            longest = max(fitting, key=len, default=())
            if not longest:
                break
            own.append((end, longest))
            end += len(longest)
        if end == len(prompt) - 1:
            found.add(prompt)
            taken.update(own)
    for piece in taken:
        del pieces[piece]
    return found


def _logged(losses) -> torch.Tensor:
    return torch.tensor([_number(each["loss"]) for call in losses for each in call])


def _number(loss) -> float:
    return float(loss[0] if isinstance(loss, tuple) else loss)
