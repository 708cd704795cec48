"""What every error of the package is."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from dormouse import (
    ArgumentError,
    DeviceError,
    DormouseError,
    InternalError,
    MemoryTierError,
    StateError,
    StorageError,
)
from dormouse.errors import from_status
from dormouse.failures.first import Failure, RankFailedError
from dormouse.hf import UnsupportedModelError
from dormouse.ranks import RanksDifferError
from dormouse.runtime import StayedAwake
from dormouse.trainers import UnsupportedTrainerError

HEADER = Path(__file__).resolve().parents[2] / "ffi" / "include" / "dormouse.h"

# By name in the header, without DORMOUSE_ERR_: the class, and the built-in class of a caller that
# does not know ours.
CLASSES = {
    "NULL": (ArgumentError, ValueError),
    "ARGUMENT": (ArgumentError, ValueError),
    "HANDLE": (ArgumentError, ValueError),
    "STALE": (ArgumentError, ValueError),
    "VERSION": (ArgumentError, ValueError),
    "CONFIG": (ArgumentError, ValueError),
    "UNSUPPORTED": (ArgumentError, ValueError),
    "OUT_OF_MEMORY": (MemoryTierError, MemoryError),
    "TIER": (MemoryTierError, MemoryError),
    "NOT_OURS": (MemoryTierError, MemoryError),
    "LIMIT": (MemoryTierError, MemoryError),
    "DEVICE": (DeviceError, RuntimeError),
    "IO": (StorageError, OSError),
    "CORRUPT": (StorageError, OSError),
    "STATE": (StateError, RuntimeError),
    "BUSY": (StateError, RuntimeError),
    "ORDER": (StateError, RuntimeError),
    "FORKED": (StateError, RuntimeError),
    "PANIC": (InternalError, RuntimeError),
}


def test_every_status_of_the_header_has_its_class():
    """Workers send errors to each other: class, text and status arrive."""
    found = re.findall(r"^#define DORMOUSE_ERR_(\w+) (-\d+)$", HEADER.read_text(), re.M)
    statuses = {name: int(status) for name, status in found}
    assert statuses.keys() == CLASSES.keys() and statuses["PANIC"] == -901
    for name, status in statuses.items():
        kind, known = CLASSES[name]
        error = from_status(status, f"what {name} says")
        for each in (error, pickle.loads(pickle.dumps(error))):
            assert type(each) is kind, name
            assert isinstance(each, known) and isinstance(each, DormouseError), name
            assert (str(each), each.status) == (f"what {name} says", status)


@pytest.mark.parametrize("kind", [UnsupportedModelError, UnsupportedTrainerError])
def test_refusals(kind):
    """Trainers catch them by the base class, or as errors of a value; workers send them."""
    with pytest.raises(DormouseError) as seen:
        raise kind("what was seen; accepted: another")
    sent = pickle.loads(pickle.dumps(seen.value))
    for error in (seen.value, sent):
        assert type(error) is kind and isinstance(error, ValueError)
        assert str(error) == "what was seen; accepted: another" and error.status == 0


@pytest.mark.parametrize("sent", [lambda each: pickle.loads(pickle.dumps(each)), copy.copy])
def test_what_workers_send_arrives_whole(sent):
    failed = sent(RankFailedError(Failure(3, "OSError: gone")))
    assert type(failed) is RankFailedError and str(failed) == "rank 3 failed: OSError: gone"
    assert failed.failure == Failure(3, "OSError: gone")
    differ = sent(RanksDifferError("ranks differ in a", {"a": [1, 2]}))
    assert type(differ) is RanksDifferError and str(differ) == "ranks differ in a"
    assert differ.differences == {"a": [1, 2]}
    for is_partial in (False, True):
        reason = sent(StayedAwake("the tier is full", is_partial=is_partial))
        assert type(reason) is StayedAwake and reason == "the tier is full"
        assert reason.is_partial is is_partial
