"""The order in which interleaved stages run their first forwards; pure."""

from __future__ import annotations

import itertools

import pytest

from dormouse.megatron.stage import turns


@pytest.mark.parametrize("stages, parts", itertools.product(range(1, 6), range(1, 4)))
def test_what_is_sent_in_a_turn_is_read_in_the_next(stages, parts):
    """So each stage knows what it receives, and every message has two ends between the same two
    turns: no order of sends and receives can wait in a circle."""
    for ops in range(1, 3 * stages + 2):
        found = [list(turns(stage, stages, parts, ops)) for stage in range(stages)]
        assert len(set(map(len, found))) == 1
        turn_of = {}
        for stage, of_stage in enumerate(found):
            for turn, each in enumerate(of_stage):
                if each is not None:
                    part, op = each
                    key = part * stages + stage, op
                    assert key not in turn_of
                    turn_of[key] = turn
        assert len(turn_of) == stages * parts * ops
        for (part, op), turn in turn_of.items():
            if part > 0:
                assert turn_of[part - 1, op] == turn - 1
            if op > 0:
                assert turn_of[part, op - 1] < turn
