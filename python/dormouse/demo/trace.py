"""Reads and writes recorded rollouts (``examples/rollouts``).

A *rollout group* is one prompt, its sampled responses with their rewards, and the policy's
log-probability of each of their tokens. ``trace.json`` has the settings of the recording and lists
the groups, one file each. Needs neither torch nor libdormouse.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from . import paths

INDEX_FILE = "trace.json"
FORMAT = 1

# Decimals of recorded log-probabilities, about their FP32 noise.
LOGPROB_DECIMALS = 6

PROMPT_TOKENS_MIN = 2


class TraceError(ValueError):
    """An invalid recorded file. The message has the file, the value seen and the accepted
    values."""


@dataclass(frozen=True)
class Rollout:
    """One sampled response: token ids, text, log-probability per token, reward, advantage."""

    tokens: list[int]
    text: str
    logprobs: list[float]
    reward: float
    advantage: float


@dataclass(frozen=True)
class RolloutGroup:
    """One prompt with its rollouts."""

    id: str
    work: str
    question: str
    prompt: list[int]
    rollouts: list[Rollout]

    @property
    def mean_length(self) -> float:
        """Mean response length in tokens."""
        return sum(len(r.tokens) for r in self.rollouts) / len(self.rollouts)


@dataclass(frozen=True)
class Trace:
    """All groups and the settings of the recording."""

    model: dict
    sampling: dict
    default_group: str
    groups: list[str]
    directory: Path

    def load(self, group_id: str | None = None) -> RolloutGroup:
        """Returns the named group, or the default one."""
        wanted = group_id or self.default_group
        if wanted not in self.groups:
            accepted = ", ".join(self.groups)
            raise TraceError(f"group {wanted!r} is not recorded; accepted: {accepted}")
        return read_group(self.directory / f"{wanted}.json")


def read(directory: Path = paths.TRACE_DIR) -> Trace:
    """Reads the trace's index."""
    path = directory / INDEX_FILE
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise TraceError(f"{path}: format {data.get('format')!r}; accepted: {FORMAT}")
    if data["default_group"] not in data["groups"]:
        raise TraceError(f"{path}: default group {data['default_group']!r} is not in its groups")
    return Trace(data["model"], data["sampling"], data["default_group"], data["groups"], directory)


def read_group(path: Path) -> RolloutGroup:
    """Reads and checks one group's file."""
    data = read_json(path)
    rollouts = [Rollout(**r) for r in data.pop("rollouts")]
    group = RolloutGroup(rollouts=rollouts, **data)
    check(group, str(path))
    return group


def write(trace: Trace, groups: list[RolloutGroup]) -> None:
    """Writes the index and every group's file."""
    index = asdict(trace)
    index.pop("directory")
    trace.directory.mkdir(parents=True, exist_ok=True)
    for group in groups:
        check(group, group.id)
        path = trace.directory / f"{group.id}.json"
        path.write_text(_compact(asdict(group)), encoding="utf-8")
    (trace.directory / INDEX_FILE).write_text(
        json.dumps({"format": FORMAT, **index}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


def check(group: RolloutGroup, where: str) -> None:
    """Raises :class:`TraceError` for a group that cannot be trained on."""
    if len(group.prompt) < PROMPT_TOKENS_MIN:
        raise TraceError(
            f"{where}: prompt of {len(group.prompt)} tokens; accepted: at least {PROMPT_TOKENS_MIN}"
        )
    if not group.rollouts:
        raise TraceError(f"{where}: 0 rollouts; accepted: at least 1")
    for i, rollout in enumerate(group.rollouts):
        if not rollout.tokens:
            raise TraceError(f"{where}: rollout {i} has 0 tokens; accepted: at least 1")
        if len(rollout.logprobs) != len(rollout.tokens):
            raise TraceError(
                f"{where}: rollout {i} has {len(rollout.logprobs)} log-probabilities; "
                f"accepted: {len(rollout.tokens)}, one per token"
            )
        values = [*rollout.logprobs, rollout.reward, rollout.advantage]
        bad = [v for v in values if not math.isfinite(v)]
        if bad:
            raise TraceError(f"{where}: rollout {i} has {bad[0]}; accepted: finite numbers")


def advantages(rewards: list[float], epsilon: float = 1e-4) -> list[float]:
    """Returns ``(reward - mean) / (standard deviation + epsilon)`` per reward; zeros if all are
    equal.

    The standard deviation is the sample's (divided by N - 1), as in GRPO trainers.
    """
    n = len(rewards)
    mean = sum(rewards) / n
    spread = [r - mean for r in rewards]
    if n < 2 or max(rewards) == min(rewards):
        return [0.0] * n
    deviation = math.sqrt(sum(s * s for s in spread) / (n - 1))
    return [s / (deviation + epsilon) for s in spread]


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(
            f"{path} is missing; python -m dormouse.demo record and record-epochs write such files"
        ) from None
    except json.JSONDecodeError as error:
        raise TraceError(f"{path} is not JSON: {error}") from None


def _compact(data: dict) -> str:
    """Formats JSON with one line per field: readable diffs, small files."""
    rollouts = data.pop("rollouts")
    rows = ("  {\n" + _fields(rollout, indent=3) + "\n  }" for rollout in rollouts)
    listed = ' "rollouts": [\n' + ",\n".join(rows) + "\n ]"
    return "{\n" + _fields(data, indent=1) + ",\n" + listed + "\n}\n"


def _fields(data: dict, indent: int) -> str:
    pairs = ((json.dumps(k), json.dumps(v, ensure_ascii=False)) for k, v in data.items())
    return ",\n".join(f"{' ' * indent}{key}: {value}" for key, value in pairs)
