"""Every Python example of the pages for users, in order and in one namespace per page.

A block fenced as "python no-run" needs a GPU, or what these tests do not have.
"""

from __future__ import annotations

import io
import json
import re
import types

import pytest
import torch
from conftest import ROOT
from models import conversations, group, loss_fn, tiny
from test_token_scores import padded

import dormouse
from dormouse.hf import SharedPrefix

BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# How the pages make a runtime. A process has one per device, and tests share theirs.
RUNTIME = re.compile(r'dormouse\.Runtime\(nvme_dir="/scratch"\)')
ROWS, COLUMNS = 7, 9


class Optimizer:
    """Counts its steps, and takes the gradients."""

    def __init__(self, model):
        self.model = model
        self.steps = 0

    def step(self):
        assert any(parameter.grad is not None for parameter in self.model.parameters())
        self.model.zero_grad()
        self.steps += 1


@pytest.fixture
def names(runtime) -> dict:
    """What the pages take for given."""
    model = tiny(dtype=torch.float32)
    return {
        "RUNTIME": runtime,
        "torch": torch,
        "dormouse": dormouse,
        "model": model,
        "optimizer": Optimizer(model),
    }


def run(page: str, names: dict, *, blocks: int) -> None:
    """Runs the blocks of a page, of which there are ``blocks``."""
    found = BLOCKS.findall((ROOT / page).read_text())
    assert len(found) == blocks
    for number, block in enumerate(found):
        code = RUNTIME.sub("RUNTIME", block)
        exec(compile(code, f"{page}, example {number}", "exec"), names)


def of_a_group() -> dict:
    own = group()
    return {
        "prompt_ids": own.prompt,
        "response_ids": own.responses,
        "weights": own.weights,
        "loss_fn": loss_fn,
    }


def of_a_padded_batch() -> dict:
    ids, mask, keep = padded([17, 11, 17, 17, 11, 17, 11], [4, 6, 1, 8, 3, 2, 5], seed=3)
    assert (len(ids), keep) == (ROWS, COLUMNS)
    return {"ids": ids, "mask": mask, "columns": keep}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def test_readme(names):
    run("README.md", names | of_a_group(), blocks=1)
    assert names["optimizer"].steps == 1


def test_quickstart(names):
    rollouts = [(each.tokens, each.labels, each.weight) for each in conversations(seed=2)]
    padded_batch, logged, ops = of_a_padded_batch(), [], []
    run(
        "docs/quickstart.md",
        names
        | of_a_group()
        | {
            "json": json,
            "file": io.StringIO(),
            "wandb": types.SimpleNamespace(log=logged.append),
            "rollouts": rollouts,
            "advantages": normal(len(rollouts)),
            "returns": normal(len(rollouts)),
            "input_ids": padded_batch["ids"],
            "attention_mask": padded_batch["mask"],
            "response_columns": padded_batch["columns"],
            "grpo_loss": lambda values, entropies: (values + entropies).mean(),
            "ids": torch.arange(40) % 5,
            "offsets": [0, 10, 20, 30, 40],
            "run": ops.append,
        },
        blocks=8,
    )
    assert names["optimizer"].steps == 2
    assert logged and ops


def test_token_filtering(names):
    batch = of_a_padded_batch()
    run(
        "docs/token-filtering.md",
        names
        | batch
        | {
            "shared": SharedPrefix(names["model"], names["RUNTIME"]),
            "reference": normal(ROWS, COLUMNS),
            "loss": lambda values: values.mean(),
            "loss_fn": lambda logits: logits.square().mean(),
            "keep": batch["mask"].bool(),
        },
        blocks=2,
    )


def test_trainers(names):
    batch = of_a_padded_batch()
    head = torch.nn.Linear(names["model"].config.hidden_size, 1)

    def loss(values, own=None):
        return values.mean()

    run(
        "docs/trainers.md",
        names
        | batch
        | {
            "runtime": names["RUNTIME"],
            "shared": SharedPrefix(names["model"], names["RUNTIME"]),
            "make_engine": lambda: torch.zeros(1 << 20),
            "t": 0.7,
            "tokens": torch.arange(24) % 7,
            "cu_seqlens": torch.tensor([0, 10, 24]),
            "p": torch.tensor([6, 6]),
            "loss": loss,
            "microbatches": [slice(0, 3), slice(3, 5), slice(5, ROWS)],
            "value_head": head,
            "old": normal(ROWS, COLUMNS),
            "advantages": normal(ROWS, COLUMNS),
            "returns": normal(ROWS, COLUMNS),
            "batches": [{"input_ids": batch["ids"], "labels": batch["ids"]}],
        },
        blocks=6,
    )
    assert names["optimizer"].steps == 3
    assert head.weight.grad is not None
