"""What is recorded: training steps of a real model's shapes, on a GPU whose kernels do nothing.

Weights are never filled, so only code whose sizes do not depend on values is run here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from dormouse.headline.models import config_of
from dormouse.headline.shapes import Geometry
from transformers import LlamaForCausalLM

DEVICE = torch.device("cuda", 0)
SEED = 7

# Widths of published models: 1B and 8B of the Llama 3 family.
LLAMA_1B = Geometry("llama3-1b", 2048, 8192, 16, 32, 8, 128256, k=1024, wave_tokens=2048)
LLAMA_8B_LAYERS = Geometry("llama3-8b", 4096, 14336, 4, 32, 8, 128256, k=1024, wave_tokens=4096)

PROMPT_TOKENS = 8192
RESPONSE_TOKENS = (700, 700, 512, 384, 640, 512, 300, 348)
WAVE_TOKENS = 2304
WAVES = 2
GROUP_STEPS = 2
DENSE_BATCH, DENSE_TOKENS, DENSE_STEPS = 4, 4096, 3
VARIABLE_STEPS, VARIABLE_TOKENS = 32, (512, 16384)


@dataclass(frozen=True)
class Workload:
    """``run`` makes everything it uses, so that a recording begins with an empty GPU."""

    about: str
    run: Callable[[], None]


def build(geometry: Geometry) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """A model in BF16 with tied embeddings, no byte of it written, and its AdamW."""
    config = config_of(geometry)
    config.tie_word_embeddings = True
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=DEVICE)
    model.tie_weights()
    return model.train(), torch.optim.AdamW(model.parameters(), lr=1e-5)


def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The end of every trainer's step."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def dense_step(model, optimizer, batch: int, length: int) -> None:
    """Next-token loss over every row, in FP32 as trainers compute it."""
    tokens = torch.zeros(batch, length, dtype=torch.long).to(DEVICE)
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
    del logits
    loss.backward()
    del loss, tokens
    finish(model, optimizer)


def dense_update() -> None:
    model, optimizer = build(LLAMA_1B)
    for _ in range(DENSE_STEPS):
        dense_step(model, optimizer, DENSE_BATCH, DENSE_TOKENS)


def variable_length() -> None:
    model, optimizer = build(LLAMA_8B_LAYERS)
    for length in lengths(VARIABLE_STEPS, *VARIABLE_TOKENS):
        dense_step(model, optimizer, 1, length)


def lengths(count: int, least: int, most: int) -> Iterable[int]:
    """Sequence lengths as data has them: each octave as often, none twice, no round numbers."""
    chance = random.Random(SEED)
    return [int(least * (most / least) ** chance.random()) for _ in range(count)]


def demo_update() -> None:
    """Needs the library; on torch's allocator nothing sleeps, and everything else is the same."""
    import dormouse
    from dormouse.headline.group import DeviceGrpoLoss
    from dormouse.hf import SharedPrefix

    runtime = dormouse.install(DEVICE, mode="copy").runtime
    model, optimizer = build(LLAMA_1B)
    shared = SharedPrefix(model, runtime)
    for _ in range(GROUP_STEPS):
        group = dormouse.Group(
            torch.arange(PROMPT_TOKENS), [torch.arange(n) for n in RESPONSE_TOKENS]
        )
        loss = DeviceGrpoLoss.synthetic(LLAMA_1B.vocab, group, DEVICE)
        report = shared.backward(group, loss, wave_tokens=WAVE_TOKENS)
        assert report.counts["waves"] == WAVES, report.counts
        del loss, report
        finish(model, optimizer)


def pipeline_interleave() -> None:
    from pipeline import Stage

    stage = Stage(LLAMA_8B_LAYERS)
    for _ in range(2):
        stage.step()


WORKLOADS = {
    "demo_update": Workload(
        f"shared-prefix update (phases A, B, C) of a Llama of 1.2 B parameters, BF16, AdamW; "
        f"prompt of {PROMPT_TOKENS} tokens, {len(RESPONSE_TOKENS)} responses of "
        f"{min(RESPONSE_TOKENS)} to {max(RESPONSE_TOKENS)}, {WAVES} waves; {GROUP_STEPS} steps, "
        "the first with its probe; a Scope is one layer of one phase A",
        demo_update,
    ),
    "dense_update": Workload(
        f"full fine-tuning of a Llama of 1.2 B parameters, BF16, AdamW; {DENSE_BATCH} sequences of "
        f"{DENSE_TOKENS} tokens; {DENSE_STEPS} steps",
        dense_update,
    ),
    "variable_length": Workload(
        f"full fine-tuning of {LLAMA_8B_LAYERS.layers} layers and the embedding of a Llama of 8 B "
        f"parameters, BF16, AdamW; one sequence of another length each step, "
        f"{VARIABLE_TOKENS[0]} to {VARIABLE_TOKENS[1]} tokens; {VARIABLE_STEPS} steps",
        variable_length,
    ),
    "pipeline_interleave": Workload(
        "stage 1 of 4 of a pipeline, 2 virtual stages of 2 layers of 8 B width, interleaved 1F1B, "
        "8 microbatches of 1 x 4096 tokens, BF16, AdamW; received on streams of their own; 2 steps",
        pipeline_interleave,
    ),
}
