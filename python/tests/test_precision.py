"""Shared prompts in FP32 and BF16, dense and with experts, on one and two ranks: as near to FP64 as
the padded batch is."""

from __future__ import annotations

from pathlib import Path

import pytest
from precision import CASES, assert_as_near_as_plain, left, run
from precision_worker import KINDS

WORKER = Path(__file__).with_name("precision_worker.py")
WORKER_SECONDS_MAX = 600


@pytest.fixture(scope="module", params=[2, 1], ids=["two ranks", "one rank"])
def of_ranks(request, tmp_path_factory):
    """Where ranks left what, and how many there were."""
    directory, ranks = tmp_path_factory.mktemp("ranks"), request.param
    run(WORKER, directory, ranks, seconds_max=WORKER_SECONDS_MAX)
    return directory, ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_fp64_as_those_of_the_padded_batch(of_ranks, kind, name):
    for of_rank in left(*of_ranks, kind):
        assert_as_near_as_plain(of_rank[name])
