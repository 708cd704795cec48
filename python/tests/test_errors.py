"""What every error of the package is."""

from __future__ import annotations

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
from dormouse.hf import UnsupportedModelError
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
