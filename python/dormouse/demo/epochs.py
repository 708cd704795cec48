"""Epochs of rollouts of one policy while it trains (``examples/rollouts/epochs``).

In each epoch the policy answers each prompt and is updated after it, with the demo's loss and
rewards. It trains on the answers at :data:`TRAINED`; a greedy one is drawn beside them, from the
same weights. Weights are FP32, updates run under autocast to BF16, and a BF16 copy samples, as in
trainers with a rollout engine. ``epochs.json`` has the settings, ``N.json`` an epoch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import paths, trace

INDEX_FILE = "epochs.json"
FORMAT = 1
DIRECTORY = paths.TRACE_DIR / "epochs"

EPOCHS = 4
RESPONSES = 4
RESPONSE_TOKENS_MAX = 64
# Of the rollouts that are trained on, and 0 for the most likely tokens.
TRAINED, GREEDY = 1.0, 0.0
TEMPERATURES = (TRAINED,) * RESPONSES + (GREEDY,)

# AdamW without decay of weights and a clipped norm, as trainers of GRPO have them.
LEARNING_RATE = 1e-5
NORM_MAX = 1.0


@dataclass(frozen=True)
class Answer:
    """One response: token ids, the temperature that it was drawn at, and its reward."""

    tokens: list[int]
    temperature: float
    reward: float


@dataclass(frozen=True)
class Epoch:
    """Answers of an epoch by the name of their prompt, in the order in which they were drawn."""

    number: int
    answers: dict[str, list[Answer]]


@dataclass(frozen=True)
class Recording:
    """All epochs, the settings, and token ids of the prompts by name."""

    settings: dict
    prompts: dict[str, list[int]]
    epochs: list[Epoch]


def read(directory: Path = DIRECTORY) -> Recording:
    """Reads what was recorded. Raises :class:`dormouse.demo.trace.TraceError`."""
    path = directory / INDEX_FILE
    data = trace.read_json(path)
    if data.get("format") != FORMAT:
        raise trace.TraceError(f"{path}: format {data.get('format')!r}; accepted: {FORMAT}")
    prompts = {name: trace.read().load(name).prompt for name in data["prompts"]}
    epochs = [_read_epoch(directory / f"{number}.json", number) for number in range(data["epochs"])]
    for epoch in epochs:
        if epoch.answers.keys() != prompts.keys():
            raise trace.TraceError(f"{path}: epoch {epoch.number} has answers to other prompts")
    return Recording(data["settings"], prompts, epochs)


def write(epoch: Epoch, prompts: list[str], settings: dict, directory: Path = DIRECTORY) -> None:
    """Writes an epoch, and the index of all up to it."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        f" {json.dumps(name)}: [\n"
        + ",\n".join("  " + json.dumps(asdict(answer)) for answer in answers)
        + "\n ]"
        for name, answers in epoch.answers.items()
    ]
    (directory / f"{epoch.number}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    index = {
        "format": FORMAT,
        "epochs": epoch.number + 1,
        "prompts": prompts,
        "settings": settings,
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def record(directory: Path, seed: int, prompts: int | None = None) -> Iterator[Epoch]:
    """Yields epochs as they are drawn, trained on and written. ``prompts``: so many of the recorded
    ones, the shortest; None: all."""
    import torch
    from tqdm import tqdm

    import dormouse

    from . import model as models
    from .record import questions

    source = models.find()
    policy = models.load_model(source)
    tokenizer = models.load_tokenizer(source)
    recorded = trace.read()
    groups = {name: recorded.load(name).prompt for name in recorded.groups}
    names = sorted(groups, key=lambda name: len(groups[name]))[:prompts]
    settings = {
        "model": {"id": models.MODEL_ID, "file": source.path.name, "sha256": source.sha256},
        "seed": seed,
        "temperatures": TEMPERATURES,
        "trained_temperature": TRAINED,
        "response_tokens_max": RESPONSE_TOKENS_MAX,
        "learning_rate": LEARNING_RATE,
        "dtype": "float32, bfloat16 in forwards",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    facts = {question.id: question.facts for question in questions()}
    with dormouse.Runtime() as runtime:
        trainer = Trainer(policy, tokenizer, seed, runtime)
        for number in range(EPOCHS):
            answers = {}
            for name in tqdm(names, desc=f"epoch {number}", unit="prompt"):
                answers[name] = trainer.step(number, name, groups[name], facts[name])
            epoch = Epoch(number, answers)
            write(epoch, names, settings, directory)
            yield epoch


class Trainer:
    """A policy that answers prompts and trains on its answers."""

    def __init__(self, policy, tokenizer, seed: int, runtime):
        import torch

        from dormouse.hf import SharedPrefix

        self._policy, self._tokenizer, self._seed = policy, tokenizer, seed
        self.sampler = copy.deepcopy(policy).eval()
        # Weights alone: angles of positions need FP32.
        for weights in self.sampler.parameters():
            weights.data = weights.data.bfloat16()
        self._shared = SharedPrefix(policy, runtime=runtime, sleep=False)
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
        )

    def step(
        self, epoch: int, name: str, prompt: list[int], facts: list[list[str]]
    ) -> list[Answer]:
        """Answers a prompt, and trains on the answers of one temperature."""
        from .record import generator, sample

        stop = self._tokenizer.eos_token_id
        rows, logprobs = sample(
            self.sampler,
            prompt,
            stop,
            generator(self._seed, f"{epoch}/{name}"),
            TEMPERATURES,
            RESPONSE_TOKENS_MAX,
        )
        answers = [
            Answer(tokens, temperature, self._reward(tokens, facts, stop))
            for tokens, temperature in zip(rows, TEMPERATURES, strict=True)
        ]
        own = [index for index, each in enumerate(answers) if each.temperature == TRAINED]
        self._update(prompt, [answers[i] for i in own], [logprobs[i] for i in own])
        return answers

    def _reward(self, tokens: list[int], facts: list[list[str]], stop: int) -> float:
        from .rewards import reward

        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return reward(text, facts, finished=tokens[-1] == stop)

    def _update(self, prompt, answers: list[Answer], logprobs: list[list[float]]) -> None:
        import torch

        import dormouse

        from .grpo import GrpoLoss

        scores = trace.advantages([answer.reward for answer in answers])
        if not any(scores):
            return
        group = dormouse.Group(prompt, [answer.tokens for answer in answers])
        loss = GrpoLoss(logprobs, scores)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self._shared.backward(group, lambda logits, *labels: loss(logits.float(), *labels))
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), NORM_MAX)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        own = zip(self.sampler.parameters(), self._policy.parameters(), strict=True)
        with torch.no_grad():
            for copied, weights in own:
                copied.copy_(weights)


def _read_epoch(path: Path, number: int) -> Epoch:
    data = trace.read_json(path)
    return Epoch(number, {name: [Answer(**each) for each in rows] for name, rows in data.items()})
