"""TRL's trainer with shared prompts in FP32 and BF16, dense and with experts, on one and two ranks:
as near to FP64 as the plain trainer is."""

from __future__ import annotations

from pathlib import Path

import pytest
from precision import CASES, assert_as_near_as_plain, left, run

WORKER = Path(__file__).with_name("trl_precision_worker.py")
WORKER_SECONDS_MAX = 600


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def of_ranks(request, tmp_path_factory) -> list:
    directory, ranks = tmp_path_factory.mktemp("ranks"), request.param
    run(WORKER, directory, ranks, seconds_max=WORKER_SECONDS_MAX, ACCELERATE_USE_CPU="true")
    return left(directory, ranks)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_near_to_fp64_as_the_trainers_own(of_ranks, name):
    for of_rank in of_ranks:
        assert_as_near_as_plain(of_rank[name])
