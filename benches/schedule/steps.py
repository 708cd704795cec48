"""Steps of a small model at several shapes: what they take and what they hold.

A process of its own under the preload library, which reads one line of JSON per shape and answers
with one: CPU seconds of each repeat, bytes tracked above idle, awake and asleep.

    steps.py NVME_DIR REPEATS
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dormouse
from dormouse.demo.memory import Memory, PeakMeter
from dormouse.hf import SharedPrefix

MODEL = LlamaConfig(
    hidden_size=320,
    intermediate_size=960,
    num_hidden_layers=8,
    num_attention_heads=5,
    num_key_value_heads=5,
    vocab_size=4096,
    max_position_embeddings=8192,
)
THREADS = 1
SEED = 5
SETTLE_S = 60


@dataclass(frozen=True)
class Shape:
    """A rollout group: tokens of the prompt and of each response, rows of a microbatch."""

    prompt: int
    responses: tuple[int, ...]
    microbatch_tokens: int

    def group(self) -> dormouse.Group:
        generator = torch.Generator().manual_seed(SEED)
        sizes = (self.prompt, *self.responses)
        ids = [torch.randint(MODEL.vocab_size, (n,), generator=generator) for n in sizes]
        return dormouse.Group(ids[0], ids[1:])


def loss_fn(logits: torch.Tensor, labels: torch.Tensor, _: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels)


class Levels(PeakMeter):
    """Peaks, and what is held between phases A and B: the prefix's own, and nothing in passing."""

    def __init__(self, memory: Memory):
        super().__init__(memory)
        self._tracked, self._idle_bytes, self.prefix_bytes = memory.tracked, 0, 0

    def idle(self) -> dict[str, int]:
        idle = super().idle()
        self._idle_bytes = idle["tracked"]
        return idle

    def on_phase(self, name: str) -> None:
        if name == "B":
            self.prefix_bytes = self._tracked() - self._idle_bytes
        super().on_phase(name)


class Steps:
    """Steps of one model, everything awake or what may sleep asleep."""

    def __init__(self, runtime: dormouse.Runtime):
        torch.manual_seed(SEED)
        self._runtime, self._memory = runtime, Memory(runtime)
        self._model = LlamaForCausalLM(MODEL)
        self._sides = {s: SharedPrefix(self._model, runtime, sleep=s) for s in (False, True)}

    def measure(self, shape: Shape, repeats: int) -> dict:
        group = shape.group()
        self._step(group, shape, sleep=False)
        seconds = [self._timed(group, shape) for _ in range(repeats)]
        awake = Levels(self._memory)
        self._step(group, shape, sleep=False, meter=awake)
        node = self._step(group, shape, sleep=True).prefix
        return {
            "seconds": seconds,
            "awake_bytes": {phase: peak["tracked"] for phase, peak in awake.peaks.items()},
            "prefix_bytes": awake.prefix_bytes,
            "asleep_bytes": self._settled(group, shape, node["asleep_bytes_peak"]),
            "dormant_bytes": node["dormant_bytes"],
        }

    def _timed(self, group, shape) -> float:
        began = time.process_time()
        self._step(group, shape, sleep=False)
        return time.process_time() - began

    def _settled(self, group, shape, asleep_bytes: int) -> int:
        """The most bytes of phase B once all has fallen asleep and before anything wakes."""
        idle, calls, peak = 0, 0, 0
        first, last = 0, len(group.responses) - 1

        def loss(logits, labels, i):
            nonlocal calls, peak
            if calls == first:
                deadline = time.monotonic() + SETTLE_S
                while self._runtime.stats()["asleep"]["current_bytes"] < asleep_bytes:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"not all of {asleep_bytes} bytes fell asleep")
                    time.sleep(0.001)
                self._memory.reset_peaks()
            if calls == last:
                peak = self._memory.tracked_peak() - idle
            calls += 1
            return loss_fn(logits, labels, i)

        self._zero()
        self._memory.trim()
        idle = self._memory.tracked()
        self._sides[True].backward(group, loss, microbatch_tokens=shape.microbatch_tokens)
        return peak

    def _step(self, group, shape, *, sleep: bool, meter: Levels | None = None):
        self._zero()
        told = None
        if meter is not None:
            meter.idle()
            told = meter.on_phase
        side = self._sides[sleep]
        return side.backward(
            group, loss_fn, microbatch_tokens=shape.microbatch_tokens, on_phase=told
        )

    def _zero(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)


def main() -> None:
    torch.set_num_threads(THREADS)
    with dormouse.Runtime(nvme_dir=sys.argv[1]) as runtime:
        steps = Steps(runtime)
        for line in sys.stdin:
            asked = json.loads(line)
            shape = Shape(asked["prompt"], tuple(asked["responses"]), asked["microbatch_tokens"])
            print(json.dumps(steps.measure(shape, int(sys.argv[2]))), flush=True)


if __name__ == "__main__":
    main()
