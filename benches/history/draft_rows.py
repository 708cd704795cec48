"""Rows of drafts: their cost in the library, and their worth on the recorded epochs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial

import torch
from drafting import LOOKUP, NGRAM, OURS, PLAIN, contenders
from examples import example
from decoding import Counts, Model, decode, earlier_of
from rows import HIGHER, LOWER, Row

from dormouse.demo import epochs, trace
from dormouse.demo import model as demo_model
from dormouse.demo.epochs import Answer, Epoch, Recording

# How rows end: prompts, responses, and tokens of each: 10⁷ tokens; a budget in bytes, of half of them.
SIZES = {
    "": (640, 16, 1000),
    "_one_prompt": (1, 10_000, 1000),
    "_over_budget": (10_000, 1, 1000, 42_000_000),
}
SPEED_BARS = {
    "draft_us_per_token": ("us", LOWER, 5.0),
    "bytes_per_token": ("bytes", LOWER, 12.0),
    "insert_tokens_per_s": ("tokens/s", HIGHER, 1e6),
}
# How rows of the recorded epochs end, by temperature.
LABELS = {epochs.TRAINED: "", epochs.GREEDY: "_greedy"}
# Of the demo's recorded groups, drafts of the last four responses from the first four.
SAME_WEIGHTS, HALF = "_same_weights", 4
KINDS = ("acceptance", "tokens_per_forward")
OVER_LOOKUP = "acceptance_over_prompt_lookup"
SPEEDUP = "rollout_speedup"
PUBLISHED = "published (arXiv 2508.18588): 65 to 79 % accepted, 1.5 times from drafting"
# Responses of a prompt and temperature that the model runs.
TIMED_RESPONSES = 1


def speed_names(label: str) -> tuple[str, ...]:
    # What is forgotten counts as recorded, and takes no bytes.
    kept = (each for each in SPEED_BARS if not (label == "_over_budget" and "bytes" in each))
    return tuple(f"{name}{label}" for name in kept)


def speed_rows(label: str) -> list[Row]:
    size = SIZES[label]
    figures = example("drafts", *size)
    how = (
        f"history/examples/drafts.rs: {figures['tokens']:,} tokens of {size[0]} prompts, 1 thread; "
        f"one token in ten differs, {figures['acceptance']:.0%} of drafted tokens are accepted"
    )
    rows = []
    for name in speed_names(label):
        unit, better, bar = SPEED_BARS[name.removesuffix(label)]
        rows.append(Row(name, unit, better, how, ours=figures[name.removesuffix(label)], bar=bar))
    return rows


def worth_rows(label: str, recording: Recording, temperature: float) -> list[Row]:
    """Acceptance and tokens per forward of all epochs but the first, which has none before it."""
    found: dict[str, Counts] = {}
    for number in range(1, len(recording.epochs)):
        for name, counts in replay(recording, number, temperature).items():
            found.setdefault(name, Counts()).add(counts)
    return rows_of(label, found, f"{text_of(recording)}, temperature {temperature}; {PUBLISHED}")


def halves() -> Recording:
    """Returns the demo's recorded groups as two epochs of a policy that did not change."""
    recorded = trace.read()
    groups = [recorded.load(name) for name in recorded.groups]
    sampling = recorded.sampling
    settings = {"model": recorded.model, "response_tokens_max": sampling["response_tokens_max"]}

    def epoch(number: int, rollouts: slice) -> Epoch:
        answers = {
            group.id: [
                Answer(each.tokens, sampling["temperature"], each.reward)
                for each in group.rollouts[rollouts]
            ]
            for group in groups
        }
        return Epoch(number, answers)

    both = [epoch(0, slice(HALF)), epoch(1, slice(HALF, None))]
    return Recording(settings, {group.id: group.prompt for group in groups}, both)


def rows_of(label: str, found: dict[str, Counts], how: str) -> list[Row]:
    rows = []
    for kind in KINDS:
        row = Row(f"{kind}{label}", "ratio", HIGHER, how)
        for name in (OURS, LOOKUP, NGRAM):
            row.put(name, getattr(found[name], kind))
        rows.append(row)
    over = Row(f"{OVER_LOOKUP}{label}", "ratio", HIGHER, how, bar=1.0)
    if found[LOOKUP].accepted:
        over.ours = found[OURS].acceptance / found[LOOKUP].acceptance
    else:
        over.note("ours", "prompt lookup has no accepted token")
    return [*rows, over]


def time_rows() -> list[Row]:
    """Time of decoding the last epoch's responses, by a model of the same cost."""
    try:
        recording = epochs.read()
    except trace.TraceError as error:
        return unmeasured(SPEEDUPS, error)
    torch.set_num_threads(1)
    model = demo_model.load_model(demo_model.find()).eval()
    last = len(recording.epochs) - 1
    rows = []
    for temperature, label in LABELS.items():
        found = replay(recording, last, temperature, Model(model), TIMED_RESPONSES)
        how = (
            f"{text_of(recording)}, the last epoch, temperature {temperature}, the first response "
            f"of each prompt; decoding alone, 1 thread, weights of the start, FP32; plain "
            f"{found[PLAIN].wall_s:.0f} s; by CPU time "
            f"{found[PLAIN].cpu_s / found[OURS].cpu_s:.2f}; {PUBLISHED}"
        )
        row = Row(f"{SPEEDUP}{label}", "ratio", HIGHER, how)
        for name in (OURS, LOOKUP, NGRAM):
            row.put(name, found[PLAIN].wall_s / found[name].wall_s)
        rows.append(row)
    return rows


def replay(
    recording: Recording,
    epoch: int,
    temperature: float,
    model: Model | None = None,
    responses_max: int | None = None,
) -> dict[str, Counts]:
    """Decodes an epoch's responses of a temperature by every contender in turn."""
    vocab, stop = tokenizer_facts()
    ways = contenders(vocab, earlier_of(recording, epoch, temperature))
    if model is None:
        del ways[PLAIN]
    found = {name: Counts() for name in ways}
    for name, answers in recording.epochs[epoch].answers.items():
        prompt = recording.prompts[name]
        own = [answer for answer in answers if answer.temperature == temperature]
        for answer in own[:responses_max]:
            for way, begin in ways.items():
                forward = model.begin(prompt) if model else None
                size = recording.settings["response_tokens_max"]
                decode(begin, prompt, answer.tokens, size, stop, found[way], forward)
    return found


@cache
def tokenizer_facts() -> tuple[int, int]:
    """Returns the size of the model's vocabulary, and its end token."""
    tokenizer = demo_model.load_tokenizer(demo_model.find())
    return len(tokenizer), tokenizer.eos_token_id


def text_of(recording: Recording) -> str:
    settings = recording.settings
    answers = next(iter(recording.epochs[0].answers.values()))
    count = sum(answer.temperature == epochs.TRAINED for answer in answers)
    return (
        f"{settings['model']['id']}, {len(recording.epochs)} epochs, {len(recording.prompts)} "
        f"prompts, {count} responses of at most {settings['response_tokens_max']} tokens"
    )


def names(label: str) -> tuple[str, ...]:
    return tuple(f"{kind}{label}" for kind in (*KINDS, OVER_LOOKUP))


def recorded_rows(label: str, temperature: float) -> list[Row]:
    try:
        recording = epochs.read()
    except trace.TraceError as error:
        return unmeasured(names(label), error)
    return worth_rows(label, recording, temperature)


def unmeasured(rows: Iterable[str], reason: Exception) -> list[Row]:
    found = [Row(name, "ratio", HIGHER, PUBLISHED) for name in rows]
    for row in found:
        row.note("ours", reason)
    return found


SPEEDUPS = tuple(f"{SPEEDUP}{label}" for label in LABELS.values())
MAKERS = [
    *((speed_names(label), partial(speed_rows, label)) for label in SIZES),
    *(
        (names(label), partial(recorded_rows, label, temperature))
        for temperature, label in LABELS.items()
    ),
    (names(SAME_WEIGHTS), lambda: worth_rows(SAME_WEIGHTS, halves(), epochs.TRAINED)),
    (SPEEDUPS, time_rows),
]
