"""verl's actor worker with shared prompts beside the unmodified one: log-probabilities, entropies,
gradients, metrics and weights, in FP64."""

from __future__ import annotations

import pytest
import torch
from models import distance
from verl.utils import tensordict_utils
from verl.workers.utils.padding import no_padding_2_padding
from verl_runs import batch_of, differences, exact, made, run, saved

from dormouse.trainers import short_prompts

# Relative distances.
EXACT = 1e-10
# Two mini-batches of two epochs.
UPDATES = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


def check(got, wanted) -> None:
    torch.testing.assert_close(got.log_probs, wanted.log_probs, rtol=0, atol=EXACT)
    torch.testing.assert_close(got.entropies, wanted.entropies, rtol=0, atol=EXACT)
    assert len(got.gradients) == len(wanted.gradients) == UPDATES
    for ours, own in zip(got.gradients, wanted.gradients, strict=True):
        assert ours.keys() == own.keys() and any(bool(each.any()) for each in own.values())
        assert distance(ours, own) < EXACT
    assert not differences(got.metrics, wanted.metrics, EXACT)
    assert got.weights.keys() == wanted.weights.keys()
    assert distance(got.weights, wanted.weights) < EXACT


DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 60, "infer_max_token_len_per_gpu": 60}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("remove_padding", [False, True])
def test_updates_are_those_of_verl(remove_padding, dynamic, directory, runtime, monkeypatch):
    exact(monkeypatch)
    settings = {
        "model": {"use_remove_padding": remove_padding},
        "engine": DYNAMIC if dynamic else {},
        "actor": {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2},
    }
    wanted = run(monkeypatch, directory, **settings)
    got = run(monkeypatch, directory, runtime=runtime, **settings)
    check(got, wanted)
    # Eight rows of three prompts, and as many in each epoch, in two mini-batches.
    assert got.sharing.rows == 24 and got.sharing.prompts < 3 + 12


def test_sequences_that_share_no_prompt_are_told_once(directory, runtime, monkeypatch, caplog):
    exact(monkeypatch)
    alone = {"prompts": (5, 7, 6, 9), "rows": [(row, 3) for row in range(4)]}
    wanted = run(monkeypatch, directory, batch=alone)
    got = run(monkeypatch, directory, runtime=runtime, batch=alone)
    check(got, wanted)
    assert got.sharing.rows == got.sharing.prompts
    told = [each.getMessage() for each in caplog.records if "shared" in each.getMessage()]
    assert len(told) == 1 and "by the 4 sequences" in told[0]


def test_a_batch_with_a_prompt_of_one_token_runs_as_in_verl(
    directory, runtime, monkeypatch, caplog
):
    short_prompts.note.cache_clear()
    exact(monkeypatch)
    short = {"prompts": (5, 1), "rows": [(row % 2, 3) for row in range(4)]}
    wanted = run(monkeypatch, directory, batch=short)
    got = run(monkeypatch, directory, runtime=runtime, batch=short)
    check(got, wanted)
    told = [each.getMessage() for each in caplog.records if "runs as in" in each.getMessage()]
    assert told == ["a batch with a prompt of fewer than 2 tokens runs as in verl"]


OTHERS = {
    "token-sum": {"actor": {"loss_agg_mode": "token-sum"}},
    "seq-mean-token-mean": {"actor": {"loss_agg_mode": "seq-mean-token-mean"}},
    "gspo": {
        "actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}
    },
    "without entropies": {"updates": {"calculate_entropy": False}},
    "tool calls": {"batch": {"tools": True}},
    "nested prompts": {"batch": {"nested": True}},
    "temperature 1": {"batch": {"temperature": 1.0}},
    "one micro-batch": {"engine": {"micro_batch_size_per_gpu": 4}},
    "a bucket of packed tokens": {
        "model": {"use_remove_padding": True},
        "engine": {"pad_to_length": True, "pad_to_length_bucket": 64},
    },
    "gradient checkpointing": {"model": {"enable_gradient_checkpointing": True}},
    "synchronisation of every micro-batch": {
        "engine": {"use_no_sync_for_gradient_accumulation": False}
    },
    "LoRA": {"model": {"lora_rank": 4, "target_modules": ["q_proj", "down_proj"]}},
    "graphs twice": {"options": {"graphs": "twice", "microbatch_tokens": 7}},
    "awake": {"options": {"sleep": False}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings(name, directory, runtime, monkeypatch):
    exact(monkeypatch)
    settings = dict(OTHERS[name])
    ours = settings.pop("options", {})
    wanted = run(monkeypatch, directory, **settings)
    check(run(monkeypatch, directory, runtime=runtime, options=ours, **settings), wanted)


def test_the_reference_is_the_model_without_the_adapter(directory, runtime, monkeypatch):
    exact(monkeypatch)
    settings = {"model": {"lora_rank": 4, "target_modules": ["q_proj", "down_proj"]}}
    found = []
    for own in (None, runtime):
        worker = made(monkeypatch, directory, runtime=own, **settings)
        with torch.no_grad():
            for name, parameter in worker.engine.module.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.05)
        passes = []
        for without in (False, True, False):
            data = batch_of()
            tensordict_utils.assign_non_tensor(data, compute_loss=False, no_lora_adapter=without)
            output = worker.infer_batch(data)
            passes.append(no_padding_2_padding(output["log_probs"], data))
        found.append(passes)
    for ours, own in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=EXACT)
    assert not torch.allclose(found[0][0], found[0][1], atol=1e-3)


def test_tied_weights(tmp_path, runtime, monkeypatch):
    exact(monkeypatch)
    saved(tmp_path, tie_word_embeddings=True)
    wanted = run(monkeypatch, tmp_path)
    check(run(monkeypatch, tmp_path, runtime=runtime), wanted)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_other_dtypes(kind, directory, runtime, monkeypatch):
    """Within rounding, of which verl's own run in FP64 is the measure."""
    exact(monkeypatch)
    truth = run(monkeypatch, directory)
    dtypes = {name: kind for name in ("param_dtype",)} | {"reduce_dtype": "fp32"}
    engine = {"model_dtype": "fp32", "mixed_precision": dtypes}
    plain = run(monkeypatch, directory, engine=engine)
    got = run(monkeypatch, directory, runtime=runtime, engine=engine)
    for name in ("log_probs", "entropies"):
        wanted = getattr(truth, name)
        errors = [float((getattr(each, name).double() - wanted).norm()) for each in (plain, got)]
        assert errors[1] <= 2 * errors[0]
    errors = [distance(as_double(each.gradients[0]), truth.gradients[0]) for each in (plain, got)]
    assert errors[1] <= 2 * errors[0]


def as_double(gradients: dict) -> dict:
    return {name: each.double() for name, each in gradients.items()}
