"""A step over the recorded batch of two turns, shared and dense, on SmolLM2-135M: JSON on stdout.

Runs under the preload library, so that the runtime's figures count all tensors.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import torch  # noqa: E402

import dormouse  # noqa: E402
from dormouse import Conversation, Tree  # noqa: E402
from dormouse.demo import model as demo_model  # noqa: E402
from dormouse.demo.memory import Memory, PeakMeter  # noqa: E402
from dormouse.hf import SharedPrefix, checked_model  # noqa: E402

TURNS = Path(__file__).with_name("turns.json")
ROUNDS = 2
ROOM_BYTES = 1 << 50
MICROBATCH_TOKENS = 256
# Of the group from which the bytes that a layer saves are learnt.
CALIBRATION_TOKENS, CALIBRATION_RESPONSE = 513, 32


def batch() -> Tree:
    """Every path of the recorded tree is a conversation; both answers carry loss."""
    recorded = json.loads(TURNS.read_text())
    conversations = []
    for each in recorded["prompts"]:
        for answer in each["answers"]:
            first = [*each["prompt"], *answer["first"]]
            before = [*first, *recorded["question"]]
            for second in answer["second"]:
                tokens = [*before, *second]
                spans = [(len(each["prompt"]), len(first)), (len(before), len(tokens))]
                conversations.append(Conversation(tokens, spans, 1 / sum(b - a for a, b in spans)))
    return Tree(conversations)


def token_losses(logits, labels, i, positions):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def dense(model, tree: Tree) -> None:
    """The ordinary way: every conversation by itself, with logits of its labels alone."""
    for i, each in enumerate(tree.conversations):
        tokens = each.tokens[: each.used_tokens - 1].unsqueeze(0)
        at = torch.cat([torch.arange(a, b) for a, b in each.labels])
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=at - 1).logits[0]
        losses = token_losses(logits, each.tokens[at], i, None)
        (each.weight * losses.sum()).backward()


def seconds_of(work, model) -> float:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def saved_bytes_per_token_layer(model, runtime) -> float:
    """Measured: what a prefix holds between its forward and its first microbatch, less K, V and
    their accumulators."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1000, (CALIBRATION_TOKENS + CALIBRATION_RESPONSE,), generator=generator)
    group = dormouse.Group(drawn[:CALIBRATION_TOKENS], [drawn[CALIBRATION_TOKENS:]])
    memory, held = Memory(runtime), {}
    shared = SharedPrefix(model, runtime, sleep=False)

    def on_phase(name):
        held[name] = memory.tracked()

    def loss(logits, labels, i):
        return torch.nn.functional.cross_entropy(logits, labels)

    for _ in range(2):
        memory.trim()
        idle = memory.tracked()
        report = shared.backward(group, loss, on_phase=on_phase)
        model.zero_grad(set_to_none=True)
    saved = held["B"] - idle - 2 * report.prefix["boundary_bytes"]
    # The last layer's rows save nothing without labels of their own.
    return saved / (CALIBRATION_TOKENS - 1) / (len(shared._view.layers) - 1)


def distinct_tokens(tree: Tree) -> int:
    """Returns how many tokens the plan runs: one row per distinct prefix with a successor."""
    prefixes = {
        tuple(each.tokens[: at + 1].tolist())
        for each in tree.conversations
        for at in range(1, each.used_tokens)
    }
    return len(prefixes)


def main() -> None:
    model = demo_model.load_model(demo_model.find())
    tree = batch()
    with dormouse.Runtime() as runtime:
        saved_bytes = saved_bytes_per_token_layer(model, runtime)
        real = checked_model.model_shape
        checked_model.model_shape = lambda view: replace(
            real(view), saved_bytes_per_token_layer=round(saved_bytes)
        )
        shared = SharedPrefix(model, runtime, sleep=False)
        # Room for everything: the plan keeps all prefixes awake, and its peak is that of such a step.
        options = {"microbatch_tokens": MICROBATCH_TOKENS, "device_bytes": ROOM_BYTES}
        measured = shared.measure_speed()
        prediction = shared.predict(tree, measured=measured, **options)
        step = lambda **more: shared.backward(tree, token_losses, **options, **more)  # noqa: E731
        report = step()
        dense(model, tree)
        model.zero_grad(set_to_none=True)
        rounds = [
            (seconds_of(lambda: dense(model, tree), model), seconds_of(step, model))
            for _ in range(ROUNDS)
        ]
        meter = PeakMeter(Memory(runtime))
        # Gradients are part of what is idle.
        step()
        meter.idle()
        step(on_phase=meter.on_phase)
    figures = {
        "distinct_tokens": distinct_tokens(tree),
        "tokens": report.counts["prefix_tokens"] + report.counts["microbatch_tokens"],
        "prediction": prediction,
        "seconds": rounds,
        "speedup": median(slow / fast for slow, fast in rounds),
        "peak_bytes": meter.step_peak()["tracked"],
        "peaks": meter.peaks,
        "saved_bytes_per_token_layer": saved_bytes,
        "conversations": len(tree.conversations),
        "dense_tokens": sum(each.used_tokens - 1 for each in tree.conversations),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
