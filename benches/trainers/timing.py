"""Ratios of seconds: JSON on stdout. ``timing.py FIGURE``, of :data:`FIGURES`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benches"), str(Path(__file__).parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import small_model  # noqa: E402
import torch  # noqa: E402
from batches import of_prompts  # noqa: E402
from pairs import alternate, median_ratio  # noqa: E402

import dormouse  # noqa: E402
from dormouse.hf import SharedPrefix, log_probabilities  # noqa: E402

PAIRS = 10
SECONDS_MAX = 120.0
# Of a batch: tokens of a prompt, rows, and tokens of each response.
PROMPT, ROWS, LENGTH = 128, 4, 32
BATCH = f"{ROWS} rows, prompts of {PROMPT} tokens and responses of {LENGTH}"


def seconds_of(work) -> tuple[float, float]:
    """By the clock, and of the CPU, which other work on the machine changes less."""
    clocks = time.perf_counter, time.process_time
    starts = [clock() for clock in clocks]
    work()
    elapsed, cpu = (clock() - start for clock, start in zip(clocks, starts, strict=True))
    return elapsed, cpu


def paired(first, second) -> dict:
    """``first`` over ``second``, after a run of each."""
    for work in (first, second):
        work()
    pairs = alternate(
        PAIRS, lambda: seconds_of(first), lambda: seconds_of(second), seconds_max=SECONDS_MAX
    )
    elapsed, cpu = ([(one[by], other[by]) for one, other in pairs] for by in (0, 1))
    return {
        "ratio": median_ratio(elapsed),
        "cpu_ratio": median_ratio(cpu),
        "pairs": len(pairs),
        "seconds": [sorted(each)[len(each) // 2] for each in zip(*elapsed, strict=True)],
        "batch": BATCH,
    }


def adapter_overhead() -> dict:
    """The differentiable call, with kept graphs, over ``backward`` with a loss function."""
    model = small_model.load()
    ids, mask = of_prompts(1, PROMPT, ROWS, LENGTH)
    group = dormouse.Group(ids[0, :PROMPT], list(ids[:, PROMPT:]), [1.0] * ROWS)
    with dormouse.Runtime() as runtime:
        shared = SharedPrefix(model, runtime)

        def loss_fn(logits, labels, i):
            return log_probabilities(logits, labels).sum()

        def call() -> None:
            scores = shared.score(ids, mask, keep=LENGTH, graphs="kept")
            scores.log_probabilities.sum().backward()
            model.zero_grad()

        def own() -> None:
            shared.backward(group, loss_fn)
            model.zero_grad()

        return paired(call, own)


def trainer_of(directory: str):
    """TRL's GRPOTrainer with shared prompts, as :func:`main` of a script leaves it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import dormouse.trl

    return dormouse.trl.share(GRPOTrainer)(
        model=small_model.load(),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=small_model.tokenizer(),
    )


def of_trainer(prompts: int) -> dict:
    """Log-probabilities, entropies and the backward of one microbatch, shared over plain."""
    from dormouse.trl.trainer import SharedScores

    with tempfile.TemporaryDirectory() as directory:
        trainer = trainer_of(directory)
        trainer.model.train()
        ids, mask = of_prompts(prompts, PROMPT, ROWS, LENGTH)

        def run(method) -> None:
            trainer.current_gradient_accumulation_steps = 1
            logps, _, _ = method(trainer.model, ids, mask, LENGTH, compute_entropy=True)
            logps.sum().backward()
            trainer.model.zero_grad()

        plain = super(SharedScores, trainer)._get_per_token_logps_and_entropies
        shared = trainer._get_per_token_logps_and_entropies
        return paired(lambda: run(shared), lambda: run(plain))


FIGURES = {
    "adapter_overhead": adapter_overhead,
    "unshared_over_dense": lambda: of_trainer(ROWS),
    "trl_over_plain": lambda: of_trainer(1),
}


if __name__ == "__main__":
    # With more, threads of a machine that others use too wait for each other.
    torch.set_num_threads(1)
    print(json.dumps(FIGURES[sys.argv[1]]()))
