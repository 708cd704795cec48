"""Seconds of a model's passes on this machine: measured rates, and predictions from them.

Counted operations alone are 12 to 24 % optimistic: a pass reads all weights and writes all gradients
whatever its rows, attention and the output embedding run at rates of their own. So passes of several
shapes are timed, dense and shared, and the rate of each feature of a pass is fitted to them
(``docs/queries/fit.md``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import _native as native
from ..group import Group
from ..queries import fit
from ..schedule import Plan
from . import support

# Timed shapes, as parts of the longest: rows of a dense pass, and those of them with logits (0: one).
DENSE = ((1 / 48, 0), (1 / 3, 0), (1 / 3, 1 / 3), (1, 0))
# Tokens of a prompt, of its responses, and of a microbatch.
SHARED = ((1 / 3, (1 / 12,), 1 / 12), (1, (1 / 12,) * 2, 1 / 6), (1 / 12, (1 / 12,) * 4, 1 / 12))
TOKENS_MIN = 48
# Of a forward and a backward together.
FORWARD_SHARE = 1 / 3
# Rounds over all shapes, and one before them that warms up.
ROUNDS = 3

Features = dict[str, int]
"""Counts by the names of ``docs/queries/rates.md``."""


@dataclass(frozen=True)
class Speed:
    """Measured seconds of a model on this machine."""

    rates: dict[str, float]
    """Seconds per row, per pair of a query and a key, per row with logits, per prefix and per
    microbatch."""
    error: float
    """The largest relative error over the timed passes."""

    def seconds(self, features: Features) -> float:
        """Returns the seconds of counted features."""
        return sum(self.rates[name] * count for name, count in features.items())


class Sample(NamedTuple):
    """A pass or a step to be timed."""

    features: Features
    run: Callable[[], None]


def fitted(samples: Sequence[Sample], seconds_of: Callable[[Callable[[], None]], float]) -> Speed:
    """Times all samples in turn, :data:`ROUNDS` times after a first that warms up, and fits rates
    to their medians."""
    rounds = [[seconds_of(sample.run) for sample in samples] for _ in range(ROUNDS + 1)][1:]
    medians = map(statistics.median, zip(*rounds, strict=True))
    pairs = [(sample.features, each) for sample, each in zip(samples, medians, strict=True)]
    answer = fit(pairs, "relative")
    return Speed(answer["rates"], answer["worst_relative_error"])


def seconds_on(device: torch.device) -> Callable[[Callable[[], None]], float]:
    """Returns a function that times another."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds_of(run: Callable[[], None]) -> float:
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - start

    return seconds_of


def dense_samples(
    view: support.ModelView, device: torch.device, tokens: int, adopt: Callable
) -> list[Sample]:
    """Returns dense passes. ``adopt``: of the trial in which they run."""

    def sample(rows: int, logit_rows: int) -> Sample:
        drawn = draw(view, rows + 1, device)
        arguments: dict = {"use_cache": False}
        if view.selects_logits:
            arguments[support.LOGITS_ROWS] = torch.arange(rows - logit_rows, rows, device=device)

        def run() -> None:
            output = view.model(input_ids=drawn[None, :-1], **arguments)
            logits = support.logits_of(output)[0, -logit_rows:]
            loss = torch.nn.functional.cross_entropy(logits, drawn[-logit_rows:])
            adopt(loss)
            loss.backward()

        return Sample(of_dense([(rows, logit_rows if view.selects_logits else rows)]), run)

    return [sample(_part(tokens, rows), _part(tokens, logits)) for rows, logits in DENSE]


def shared_groups(view: support.ModelView, tokens: int) -> list[tuple[Group, int]]:
    """Returns groups to be run, and the rows of their microbatches."""
    cpu = torch.device("cpu")
    return [
        (
            Group(
                draw(view, _part(tokens, prompt) + 1, cpu),
                [draw(view, _part(tokens, each), cpu) for each in responses],
            ),
            _part(tokens, microbatch),
        )
        for prompt, responses, microbatch in SHARED
    ]


def draw(view: support.ModelView, count: int, device: torch.device) -> torch.Tensor:
    """Returns random tokens, the same for equal counts."""
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randint(view.vocab_size, (count,), generator=generator, device="cpu")
    return drawn.to(device)


def _part(tokens: int, share: float) -> int:
    return max(1, round(tokens * share))


def of_dense(runs: Iterable[tuple[int, int]]) -> Features:
    """Returns the features of dense passes, each of some rows, some of which have logits."""
    runs = list(runs)
    return {
        "microbatches": len(runs),
        "rows": sum(rows for rows, _ in runs),
        "causal_pairs": sum(rows * (rows + 1) // 2 for rows, _ in runs),
        "logit_rows": sum(logit_rows for _, logit_rows in runs),
    }


def of_plan(plan: Plan, shape: native.ModelShape) -> Features:
    """Returns the features of a plan's ops. A node that no loss reads leaves out most of the last
    layer; one that runs forward again does a third of its work more."""
    names = ("nodes", "microbatches", "rows", "prefix_pairs", "causal_pairs", "logit_rows")
    sums = dict.fromkeys(names, 0.0)
    nodes, ops = plan.nodes(), list(plan)
    microbatch = native.OpKind.MICROBATCH
    scored = {op.node for op in ops if op.scores and op.kind is not microbatch}
    for op in ops:
        sums["logit_rows"] += len(set().union(*(score.rows for score in op.scores)))
        if op.kind is microbatch:
            sums["microbatches"] += 1
            for member in op.members:
                _add(sums, member.first_position, len(member.rows), 1.0, 1.0)
        elif op.kind in (native.OpKind.PREFIX_FORWARD, native.OpKind.FORWARD_AGAIN):
            share = 1.0 if op.kind is native.OpKind.PREFIX_FORWARD else FORWARD_SHARE
            live, whole = shape.layers, shape.layers * shape.layer_linear_weights
            weights = whole
            if op.node not in scored:
                live -= 1
                weights += shape.last_layer_prefix_weights - shape.layer_linear_weights
            rows = nodes[op.node].rows
            sums["nodes"] += share
            linear, pairs = share * weights / whole, share * live / shape.layers
            _add(sums, rows.start, len(rows), linear, pairs)
    return {name: round(count) for name, count in sums.items()}


def _add(sums: dict, before: int, rows: int, linear: float, pairs: float) -> None:
    sums["rows"] += linear * rows
    sums["prefix_pairs"] += pairs * rows * before
    sums["causal_pairs"] += pairs * rows * (rows + 1) / 2
