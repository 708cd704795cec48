"""K and V of prompts on three context-parallel ranks: what each has, gathers, passes on, sends,
gets back, and the attention of what passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_workers import run_ranks

from counted import BACKWARD, FORWARD
from shards_worker import MULTIPLE, TOKENS, gradients_of, whole

WORKER = Path(__file__).with_name("shards_worker.py")
SECONDS_MAX = 300
RANKS = 3
EXACT = 1e-12
# Of headers, and of two barriers.
SENT_BESIDE_BYTES_MAX = 10_000


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank left."""
    directory = tmp_path_factory.mktemp("shards")
    assert run_ranks(WORKER, directory, ranks=RANKS, seconds_max=SECONDS_MAX) == [0] * RANKS
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def rows_of(of_rank: dict) -> list[int]:
    return [row for each in of_rank["ranges"] for row in each]


@pytest.mark.parametrize("tokens", TOKENS)
def test_each_row_has_one_owner_with_as_many_rows_as_others(tokens, found):
    own = [each[tokens] for each in found]
    assert sorted(row for each in own for row in rows_of(each)) == list(range(tokens))
    (rows,) = {each["rows"] for each in own}
    assert rows * RANKS < tokens + 2 * RANKS * MULTIPLE
    for each in own:
        assert all(part.start % MULTIPLE == 0 for part in each["ranges"])
        padding = [0] * (rows - len(rows_of(each)))
        assert each["positions"].tolist() == rows_of(each) + padding


@pytest.mark.parametrize("tokens", TOKENS)
def test_all_ranks_gather_the_prompt_without_padding(tokens, found):
    for own in (each[tokens] for each in found):
        for ours, wanted in zip(own["gathered"], whole(tokens), strict=True):
            assert torch.equal(ours, wanted) and ours.is_contiguous()


@pytest.mark.parametrize("tokens", TOKENS)
def test_an_owner_adds_the_gradients_of_all_ranks_in_fp32(tokens, found):
    of_ranks = [gradients_of(rank, tokens) for rank in range(RANKS)]
    for number in range(2):
        summed = sum(each[number].float() for each in of_ranks).bfloat16()
        # What BF16 adds is another sum.
        assert not torch.equal(summed, sum(each[number] for each in of_ranks))
        for own in (each[tokens] for each in found):
            gradient, rows = own["gradients"][number], rows_of(own)
            assert torch.equal(gradient[: len(rows)], summed[rows])
            assert not gradient[len(rows) :].any()


@pytest.mark.parametrize("tokens", TOKENS)
def test_each_block_passes_all_ranks_and_its_sums_come_home(tokens, found):
    of_ranks = [gradients_of(rank, found[0][tokens]["rows"]) for rank in range(RANKS)]
    for own in (each[tokens]["passed"] for each in found):
        assert sorted(own["seen"]) == list(range(RANKS))
        for rank, blocks in own["seen"].items():
            assert all(map(torch.equal, blocks, found[rank][tokens]["passed"]["own"]))
        for number, sums in enumerate(own["sums"]):
            wanted = sum(each[number].float() for each in of_ranks).permute(1, 2, 0, 3)
            assert sums.dtype is torch.float32 and torch.equal(sums, wanted)


@pytest.mark.parametrize("tokens", TOKENS)
def test_attention_of_what_passes_is_that_of_whole_sequences(tokens, found):
    for own in (each[tokens]["attended"] for each in found):
        # Of the prompt, of two responses, and of the prompt's gradients by all responses.
        assert len(own) == 4 + 2 * 4 + 2
        for ours, wanted in own.values():
            torch.testing.assert_close(ours, wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("way", ("exchanged", "ring exchanged"))
@pytest.mark.parametrize("direction", (FORWARD, BACKWARD))
def test_sockets_send_what_is_planned(direction, way, found):
    for own in found:
        planned, sent = own[way][direction]
        assert planned > 20 * SENT_BESIDE_BYTES_MAX
        assert planned <= sent < planned + SENT_BESIDE_BYTES_MAX
