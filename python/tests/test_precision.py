"""Calls and steps under ``fully_shard`` in FP32, BF16 and mixed precision, dense and with experts, on
two ranks: as near to FP64 as the padded batch is. Other wrappers, adapters and one rank:
tests_trainers/test_precision.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from precision import CASES, assert_as_near_as_plain, left, run
from rank_workers import RANKS

WORKER = Path(__file__).with_name("precision_worker.py")
WORKER_SECONDS_MAX = 300
KINDS = ("score, fully_shard", "step, fully_shard")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    run(WORKER, directory, RANKS, *KINDS, seconds_max=WORKER_SECONDS_MAX)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_fp64_as_those_of_the_padded_batch(kind, name, directory):
    for of_rank in left(directory, RANKS, kind):
        assert_as_near_as_plain(of_rank[name])
