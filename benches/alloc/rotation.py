"""Rows of streams that use one large buffer in turn."""

from __future__ import annotations

import runs
from contenders import DEVICE_BYTES, Contender, Unavailable
from memory import WAITS, utilisation, waits
from rows import LOWER, Row
from search import smallest_enough
from setting import GIB, MIB, Setting

STREAMS, ROUNDS = 16, 4
BUFFER_BYTES = 2 * GIB
CAP = 1.1
# Finer than the bar is from 1.
STEP_BYTES = 16 * MIB


def rotate(contender: Contender, **environment: object) -> runs.Result:
    return runs.run(contender, "rotate", STREAMS, BUFFER_BYTES, ROUNDS, **environment)


def cap_over_live(setting: Setting, name: str) -> Row:
    how = (
        f"least budget / live bytes with which {STREAMS} streams use one {BUFFER_BYTES // GIB} GiB "
        f"buffer in turn, {ROUNDS} times round, found in steps of {STEP_BYTES // MIB} MiB; waiting "
        "is allowed"
    )
    return setting.fill(Row(name, "ratio", LOWER, how, bar=CAP), least_budget)


def least_budget(contender: Contender) -> float:
    def is_enough(budget_bytes: int) -> bool:
        try:
            rotate(contender, **{contender.budget_variable: budget_bytes})
        except MemoryError:
            return False
        return True

    most = (STREAMS + 1) * BUFFER_BYTES
    found = smallest_enough(BUFFER_BYTES, most, STEP_BYTES, is_enough)
    if found is None:
        raise Unavailable(f"{most // GIB} GiB are not enough")
    return found / BUFFER_BYTES


def added_waits(setting: Setting, name: str) -> Row:
    how = f"{', '.join(WAITS)} during the rotation on a device of {DEVICE_BYTES // GIB} GiB"
    row = Row(name, "waits", LOWER, how, bar=0)
    return setting.fill(row, lambda one: waits(rotate(one)))


def reserved_over_live(setting: Setting, name: str) -> Row:
    how = f"most device bytes held at once / live bytes, on a device of {DEVICE_BYTES // GIB} GiB"
    return setting.fill(Row(name, "ratio", LOWER, how), lambda one: 1 / utilisation(rotate(one)))


def waits_at_cap(setting: Setting, name: str) -> Row:
    how = f"the waits of stream_rotation_added_waits with a budget of {CAP} of the live bytes"
    budget_bytes = int(BUFFER_BYTES * CAP) // MIB * MIB
    return setting.fill(
        Row(name, "waits", LOWER, how),
        lambda one: waits(rotate(one, **{one.budget_variable: budget_bytes})),
    )
