"""Runs of TRL's trainers on tiny random models, with recorded completions."""

from __future__ import annotations

import random

import torch
from datasets import Dataset
from exact_layers import exact_layers
from models import VOCAB, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

PAD, EOS = 0, 1
PROMPTS = 6
LENGTH_MAX = 8


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the words t0, t1, ..."""
    words = {f"t{i}": i for i in range(VOCAB)}
    own = Tokenizer(models.WordLevel(words, unk_token="t2"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="t0", eos_token="t1", padding_side="left"
    )


def prompts(shortest: int = 5) -> Dataset:
    """Prompts of several lengths."""
    draw = random.Random(5)
    texts = [
        " ".join(f"t{draw.randrange(2, VOCAB)}" for _ in range(shortest + 3 * i))
        for i in range(PROMPTS)
    ]
    return Dataset.from_dict({"prompt": texts})


def reward(prompts, completions, **others) -> list[float]:
    return [sum(map(len, text.split())) * 0.3 - 0.1 * len(text.split()) ** 1.5 for text in completions]


class Recorded:
    """In place of the generation: completions that do not depend on the model."""

    def _generate_single_turn(self, prompt_ids, *others, **named):
        self._generations = getattr(self, "_generations", 0) + 1
        draw = random.Random(17 * self._generations + self.accelerator.process_index)
        completions = []
        for _ in prompt_ids:
            tokens = [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, LENGTH_MAX - 1))]
            # Some are truncated: without a last token of the text.
            completions.append(tokens + [EOS] if draw.random() < 0.7 else tokens)
        if isinstance(self, GRPOTrainer):
            return completions, None
        return completions


class PlainGRPO(Recorded, GRPOTrainer):
    pass


class PlainRLOO(Recorded, RLOOTrainer):
    pass


class Recorder(TrainerCallback):
    """Keeps the gradients before each step of the optimizer, and the logs."""

    def __init__(self):
        self.gradients, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **others):
        own = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.gradients.append({name.removeprefix("module."): grad for name, grad in own.items()})

    def on_log(self, args, state, control, logs=None, **others):
        self.logs.append(dict(logs))


CONFIGS = {PlainGRPO: GRPOConfig, PlainRLOO: RLOOConfig}


def config_of(trainer_class, directory, **changes):
    settings = {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_generations": 4,
        "max_completion_length": LENGTH_MAX,
        "temperature": 0.8,
        "learning_rate": 3e-3,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    base = next(kind for kind in CONFIGS if issubclass(trainer_class, kind))
    return CONFIGS[base](**(settings | changes))


def saved(directory, dtype=torch.float64, kind: str = "llama"):
    """A tiny model in a directory, from which a reference model can be loaded."""
    tiny(kind, dtype, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None).save_pretrained(
        directory
    )
    return directory


def run(*arguments, **changes):
    """Trains; returns the trainer, and the :class:`Recorder`."""
    trainer, recorder = made(*arguments, **changes)
    trainer.train()
    return trainer, recorder


def made(
    trainer_class, model, directory, *, peft_config=None, perturb=0.0, shortest=5, **changes
):
    """Returns the trainer, and the :class:`Recorder`."""
    recorder, data = Recorder(), prompts(shortest)
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_of(trainer_class, directory, **changes),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        callbacks=[recorder],
        peft_config=peft_config,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad and perturb:
                # The policy differs from the reference.
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(perturb * noise)
    return trainer, recorder


class Fp64Head:
    """TRL's head in the dtype of its input; its own computes in FP32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, chunk, softcap=None, scale=1.0, outputs=()):
        logits = torch.nn.functional.linear(hidden, weight, bias) * scale
        logps = torch.log_softmax(logits / temperature, -1)
        entropy = -(logps.exp() * logps).sum(-1) if "entropy" in outputs else None
        chosen = logps.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return chosen, entropy, None, None, None


def exact_all(monkeypatch) -> None:
    """FP64 throughout."""
    exact_layers(monkeypatch)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", Fp64Head)


def same_logs(one: list[dict], other: list[dict], tolerance: float) -> list[str]:
    """Returns what differs in the logs, times aside."""
    found = []
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        keys = {key for key in a.keys() | b.keys() if "time" not in key and "second" not in key}
        for key in sorted(keys):
            left, right = a.get(key), b.get(key)
            is_number = isinstance(left, (int, float)) and isinstance(right, (int, float))
            if left != right and not (
                is_number and abs(left - right) <= tolerance * max(1.0, abs(left))
            ):
                found.append(f"log {number}: {key} is {right!r}, of the plain trainer {left!r}")
    return found
