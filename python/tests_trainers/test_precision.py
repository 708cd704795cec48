"""Calls, windows, steps and the stand-ins for OpenRLHF and NeMo-RL in FP32, BF16 and mixed precision,
dense and with experts, on one and two ranks: as near to FP64 as the padded batch is."""

from __future__ import annotations

from pathlib import Path

import precision_worker
import pytest
from precision import CASES, assert_as_near_as_plain, left, run
from precision_worker import KINDS

WORKER = Path(precision_worker.__file__)
WORKER_SECONDS_MAX = 900


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def of_ranks(request, tmp_path_factory) -> tuple[Path, int]:
    """Where ranks left what, and how many there were."""
    directory, ranks = tmp_path_factory.mktemp("ranks"), request.param
    run(WORKER, directory, ranks, *KINDS, seconds_max=WORKER_SECONDS_MAX)
    return directory, ranks


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_fp64_as_those_of_the_padded_batch(of_ranks, kind, name):
    for of_rank in left(*of_ranks, kind):
        assert_as_near_as_plain(of_rank[name])
