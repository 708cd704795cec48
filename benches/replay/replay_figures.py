"""Rows and picture of a replay."""

from __future__ import annotations

from statistics import mean

from plot import Curve, Panel, svg
from rows import HIGHER, LOWER, Row
from updates import DENSE, SHARED, SPLIT, TRUTH, WAYS, Settings

# docs/method.md §10, over all parameters. Set before the first run.
DISTANCE_BAR = 1.25

NAMES = (
    "parameters_over_truth",
    "parameters_over_split",
    *(f"parameters_{figure}" for figure in ("max", "mean", "rms")),
    "loss_rms",
    "norm_rms",
    "loss_over_truth",
    "norm_over_truth",
    "reward",
    "equal_samples",
)
LABELS = {
    DENSE: "padded batch",
    SPLIT: "row by row",
    SHARED: "shared prompts",
    TRUTH: "padded batch, FP64",
}


def names(dtype: str) -> list[str]:
    return [f"replay_{name}_{dtype}" for name in NAMES]


def rows(settings: Settings, updates: list[dict], end: dict) -> list[Row]:
    text = described(settings)
    found = dict(
        zip(NAMES, (Row(name, "", LOWER, text) for name in names(settings.dtype)), strict=True)
    )
    truth = end["from_truth"]
    row = found["parameters_over_truth"]
    row.unit, row.bar = "ratio", DISTANCE_BAR
    row.peers = {SPLIT: truth[SPLIT]["ratio_global"]}
    row.how += "; distance of the movement from the FP64 run's, over that of the padded batch"
    for name in (SHARED, SPLIT):
        row.how += f"; {name}: " + ratios(truth[name])
    if truth[SHARED]["within_bounds"]:
        row.ours = truth[SHARED]["ratio_global"]
    else:
        row.note("ours", "outside other bounds of docs/method.md §10")

    apart = end["from_dense"]
    row = found["parameters_over_split"]
    row.unit, row.bar = "ratio", DISTANCE_BAR
    row.ours = apart[SHARED]["rms"] / apart[SPLIT]["rms"]
    row.how += "; RMS of the difference from the padded batch's, over that of rows one by one"
    for figure in ("max", "mean", "rms"):
        row = found[f"parameters_{figure}"]
        row.unit = "absolute"
        row.ours, row.peers = apart[SHARED][figure], {SPLIT: apart[SPLIT][figure]}
    for figure in ("loss", "norm"):
        row = found[f"{figure}_rms"]
        row.unit = "absolute" if figure == "loss" else "relative"
        row.ours, row.peers = rms(updates, figure, SHARED), {SPLIT: rms(updates, figure, SPLIT)}
        dense = rms(updates, figure, DENSE, TRUTH)
        row = found[f"{figure}_over_truth"]
        row.unit = "ratio"
        row.how += f"; RMS of the distance to the FP64 run's, over the padded batch's {dense:.3g}"
        row.ours = rms(updates, figure, SHARED, TRUTH) / dense
        row.peers = {SPLIT: rms(updates, figure, SPLIT, TRUTH) / dense}
    samples = end["samples"]
    row = found["reward"]
    row.unit, row.better, row.how = "mean", HIGHER, row.how + "; of greedy answers"
    earned = {name: mean(each["reward"] for each in own) for name, own in samples.items()}
    row.ours, row.peers = earned.pop(SHARED), earned
    row = found["equal_samples"]
    row.unit, row.better = "share", HIGHER
    row.how += "; greedy answers with the tokens of the padded batch's"
    row.ours = equal(samples, SHARED)
    row.peers = {name: equal(samples, name) for name in (SPLIT, TRUTH, "start")}
    return list(found.values())


def described(settings: Settings) -> str:
    size = settings.size
    return (
        f"{settings.updates} updates of {settings.layers} layers of SmolLM2-135M-Instruct, "
        f"{settings.dtype.upper()}, 1 thread; {size['responses']} responses of at most "
        f"{size['response_tokens']} tokens to {size['prompt_tokens']} prompt tokens"
    )


def ratios(error: dict) -> str:
    kinds = ("global", "median", "p99", "max")
    found = ", ".join(f"{kind} {error[f'ratio_{kind}']:.3f}" for kind in kinds)
    return f"{found}, {'inside' if error['within_bounds'] else 'outside'} the bounds"


def rms(updates: list[dict], figure: str, name: str, base: str = DENSE) -> float:
    """Returns the RMS over updates of :func:`apart`."""
    return mean(apart(each, figure, name, base) ** 2 for each in updates) ** 0.5


def apart(update: dict, figure: str, name: str, base: str = DENSE) -> float:
    """Returns the distance of an update's loss or norm from that of ``base``; of norms, relative."""
    own, other = update[figure][name], update[figure][base]
    if figure == "norm" and other != 0.0:
        return abs(own / other - 1.0)
    # If every ratio is clipped, the gradient is zero.
    return abs(own - other)


def equal(samples: dict[str, list[dict]], name: str) -> float:
    pairs = zip(samples[name], samples[DENSE], strict=True)
    return mean(own["tokens"] == dense["tokens"] for own, dense in pairs)


def picture(settings: Settings, updates: list[dict]) -> str:
    def curves(names, value) -> list[Curve]:
        return [
            Curve(LABELS[name], WAYS.index(name), [value(each, name) for each in updates])
            for name in names
        ]

    others = (SPLIT, SHARED)
    panels = [
        Panel(
            "Parameters: distance to the FP64 run",
            curves((DENSE, *others), lambda each, name: each["from_truth"][name]),
            is_log=True,
        ),
        Panel(
            "Parameters: distance to the padded batch's",
            curves(others, lambda each, name: each["from_dense"][name]),
            is_log=True,
        ),
        Panel("Loss", curves((DENSE, *others), lambda each, name: each["loss"][name])),
        Panel(
            "Loss: distance to the FP64 run's",
            curves((DENSE, *others), lambda each, name: apart(each, "loss", name, TRUTH)),
            is_log=True,
        ),
        Panel(
            "Norm of the gradients",
            curves((DENSE, *others), lambda each, name: each["norm"][name]),
        ),
        Panel(
            "Norm of the gradients: relative, to the FP64 run's",
            curves((DENSE, *others), lambda each, name: apart(each, "norm", name, TRUTH)),
            is_log=True,
        ),
    ]
    title = "Updates on the recorded rollouts, three ways"
    return svg(title, described(settings), "update", panels)
