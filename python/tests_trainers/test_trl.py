"""TRL's trainers with shared prompts, beside the unmodified ones."""

from __future__ import annotations

import pytest
import torch
from models import distance
from transformers import LlamaForCausalLM
from trl_runs import Fp64Head, PlainGRPO, PlainRLOO, exact_layers, run, same_logs, saved

import dormouse.trl


@pytest.fixture
def exact(monkeypatch):
    """FP64 throughout."""
    exact_layers(monkeypatch)
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", Fp64Head)


def both(kind, directory, runtime, *, model=None, **changes):
    """Runs the plain trainer and the shared one from the same weights."""
    path = saved(directory / "model")
    make = model or (lambda: LlamaForCausalLM.from_pretrained(path, dtype=torch.float64))
    plain = run(kind, make(), directory / "plain", **changes)
    shared_class = dormouse.trl.share(kind, runtime=runtime)
    return plain, run(shared_class, make(), directory / "shared", **changes)


def assert_equal(plain, shared, *, steps: int = 3):
    (_, wanted), (trainer, got) = plain, shared
    assert len(wanted.gradients) == len(got.gradients) == steps
    for ours, dense in zip(got.gradients, wanted.gradients, strict=True):
        assert distance(ours, dense) < 1e-10
    assert not same_logs(wanted.logs, got.logs, 1e-6)
    sharing = trainer.sharing
    assert sharing.rows > sharing.prompts_of_microbatches > sharing.prompts > 0
    return sharing


LOSSES = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "learning_rate": 3e-4,
    },
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "delta": {"loss_type": "dapo", "delta": 1.5},
    "entropy": {"loss_type": "bnpo", "entropy_coef": 0.05},
    "quantile": {"loss_type": "bnpo", "top_entropy_quantile": 0.4},
    "kl": {"loss_type": "dapo", "beta": 0.1, "perturb": 0.02},
    "truncated": {"loss_type": "grpo", "mask_truncated_completions": True},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
def test_grpo(changes, exact, runtime, tmp_path):
    """Two updates of each generation, so that ratios differ from 1 in every second one."""
    plain, shared = both(PlainGRPO, tmp_path, runtime, num_iterations=2, **changes)
    sharing = assert_equal(plain, shared)
    # Eight rows of two prompts in each window; TRL's shuffle puts few of a prompt together.
    assert (sharing.rows, sharing.prompts) == (24, 6) or "mask_truncated_completions" in changes
