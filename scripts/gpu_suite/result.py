"""A part's result from what it printed and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from . import rows
from .limits import Ended

HELD, MISSED, FAILED, CANNOT_RUN, TIMED_OUT = (
    "held",
    "missed",
    "failed",
    "cannot_run",
    "timed_out",
)
STATUSES = (HELD, MISSED, FAILED, CANNOT_RUN, TIMED_OUT)

# Statuses of a part's process.
DONE, NOT_HELD, UNABLE, BROKEN = 0, 1, 2, 3

TAIL_LINES = 40
TAIL_CHARACTERS = 6000

# As Python ends a traceback: the error's type, perhaps within its module.
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")

Read = Callable[[dict], list[dict]]


def of(
    part: str, ended: Ended, limit: float, read: Read | None = None, is_judged: bool = True
) -> dict:
    """The part's JSON. ``read``: rows of the one object that a part prints at its end. Rows of a
    part that is not judged have no bars."""
    objects = [found for line in ended.output.splitlines() if (found := _object(line)) is not None]
    found, details, why = [], {}, ""
    for each in objects:
        if "row" in each:
            found.append(rows.judged(each["row"]))
        elif "detail" in each:
            details[each["detail"].get("cell", "")] = each["detail"]
        elif "cannot_run" in each:
            why = each["cannot_run"]
        elif read is not None and each.get("held"):
            found += read(each["found"])
            details[""] = each["found"]
    found = rows.latest(found)
    if not is_judged:
        found = [rows.judged({**each, "bar": None}) for each in found]
    status, reason = _verdict(ended, limit, found, why)
    result = {
        "part": part,
        "status": status,
        "seconds": round(ended.seconds, 1),
        "rows": found,
        "why": reason,
    }
    if details:
        result["details"] = list(details.values())
    if status != HELD:
        result["output"] = tail(ended.errors + "\n" + _plain(ended.output))
    return result


def unable(part: str, why: str) -> dict:
    """The result of a part that was not started."""
    return {"part": part, "status": CANNOT_RUN, "seconds": 0.0, "rows": [], "why": why}


def tail(text: str) -> str:
    """The last lines of it."""
    return "\n".join(text.strip().splitlines()[-TAIL_LINES:])[-TAIL_CHARACTERS:]


def _verdict(ended: Ended, limit: float, found: list[dict], why: str) -> tuple[str, str]:
    missed = [each["name"] for each in found if each["met"] is False]
    if ended.status is None:
        return TIMED_OUT, f"ended at its limit of {limit:.0f} s, with {len(found)} figures"
    if ended.status == UNABLE and why:
        return CANNOT_RUN, why
    if ended.status not in (DONE, NOT_HELD) or (ended.status == NOT_HELD and not found):
        return FAILED, f"status {ended.status}: {_cause(ended.errors)}"
    if not found:
        return FAILED, "it ended well and printed no figures"
    if missed:
        return MISSED, "missed: " + "; ".join(missed)
    return (HELD, "") if ended.status == DONE else (MISSED, "not all of it was measured")


def _object(line: str) -> dict | None:
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        # The line a part was ended in.
        return None
    return found if isinstance(found, dict) else None


def _plain(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if _object(line) is None)


def _cause(text: str) -> str:
    """The last line that names an error or a panic's place and words, else the last one."""
    lines = [line for line in text.splitlines() if line.strip()]
    for index in range(len(lines) - 1, -1, -1):
        if "panicked at" in lines[index]:
            return " ".join(lines[index : index + 2])
        if _ERROR.match(lines[index]):
            return lines[index]
    return lines[-1] if lines else "no word"
