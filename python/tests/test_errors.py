"""What every error of the package is."""

from __future__ import annotations

import pickle

import pytest

from dormouse import DormouseError
from dormouse.hf import UnsupportedModelError
from dormouse.trainers import UnsupportedTrainerError


@pytest.mark.parametrize("kind", [UnsupportedModelError, UnsupportedTrainerError])
def test_refusals(kind):
    """Trainers catch them by the base class, or as errors of a value; workers send them."""
    with pytest.raises(DormouseError) as seen:
        raise kind("what was seen; accepted: another")
    sent = pickle.loads(pickle.dumps(seen.value))
    for error in (seen.value, sent):
        assert type(error) is kind and isinstance(error, ValueError)
        assert str(error) == "what was seen; accepted: another" and error.status == 0
