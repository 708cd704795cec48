"""Layers split over two ranks by DTensor, over gloo: whole-model gradients, or refused."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import test_score_outputs
import torch
from rank_workers import RANKS, run_ranks
from tensor_parallel_worker import LAYERS, LONG_GROUP, OPTIONS
from test_token_scores import a_batch, dense, loss_of

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
# For all cases, on a busy machine.
SECONDS_MAX = 300
FP64_BOUND = 1e-10
FP32_BOUND = 1e-4


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    directory = tmp_path_factory.mktemp("ranks")
    codes = run_ranks(WORKER, directory, seconds_max=SECONDS_MAX)
    assert codes == [0] * RANKS
    names = {path.stem for path in directory.glob("*.0")}
    return {
        name: [torch.load(directory / f"{name}.{rank}") for rank in range(RANKS)] for name in names
    }


SCORED = {"llama_kept": "kept", "llama_twice": "twice", "qwen2_auto": "twice", "torch_kept": "kept"}


@pytest.mark.parametrize("name", SCORED)
def test_scores_have_the_gradients_of_the_whole_model(name, found):
    kind = name.partition("_")[0]
    model = models.tiny("llama" if kind == "torch" else kind, **LAYERS)
    ids, mask, keep = a_batch()
    for _ in range(2):
        values = dense(model, ids, mask, keep, OPTIONS["temperature"])
        hidden = test_score_outputs.dense(model, ids, mask, keep).last_hidden_state
        (loss_of(*values, mask[:, -keep:]) + hidden.sin().sum()).backward()
    wanted = models.take_gradients(model)
    for rank in found[name]:
        assert rank["graphs"] == SCORED[name]
        assert rank["counts"]["groups"] == 2
        torch.testing.assert_close(rank["values"], values[0].detach(), rtol=0, atol=1e-11)
        torch.testing.assert_close(rank["alone"], values[0].detach(), rtol=0, atol=1e-11)
        assert models.distance(rank["gradients"], wanted) < FP64_BOUND
        assert rank["hooks"] == 2, "one whole gradient for each call, and none for the check"


def test_prompts_sleep_and_gradients_stay_the_same_bits(found):
    model = models.tiny(**LAYERS)
    models.dense_backward(model, models.group(**LONG_GROUP))
    wanted = models.take_gradients(model)
    for awake, asleep in zip(found["awake"], found["asleep"], strict=True):
        assert models.distance(awake["gradients"], wanted) < FP64_BOUND
        for name, gradient in awake["gradients"].items():
            assert torch.equal(gradient, asleep["gradients"][name]), name
        prefix = asleep["prefix"]
        # Every rank has half of the heads and of the MLPs' rows.
        assert prefix["dormant_bytes"] > 300 * (160 // 2) * 8 * 3 * LAYERS["num_hidden_layers"]
        assert prefix["asleep_at_b_bytes"] == prefix["dormant_bytes"]
        assert prefix["stray_wakes"] == 0


def test_ranks_check_together_what_changed_on_one_of_them(found):
    model = models.tiny(**LAYERS, dtype=torch.float32)
    models.dense_backward(model, models.group(**LONG_GROUP))
    of_group = models.take_gradients(model)
    dense(model, *a_batch(), 1.0)[0].sum().backward()
    of_batch = models.take_gradients(model)
    one, other = found["one rank"]
    for rank in (one, other):
        steps = zip(rank["gradients"], "gg" "bb" "g" "bb" "g", strict=True)
        for number, (gradients, kind) in enumerate(steps):
            wanted = of_group if kind == "g" else of_batch
            assert models.distance(gradients, wanted) < FP32_BOUND, number
    assert "note changed; accepted" in one["error"]
    assert "on another rank; accepted" in other["error"]
    note, hook = one["reasons"][1:4:2]
    assert note == "note changed" and hook.startswith("model.layers.1.mlp._forward_hooks")
    assert other["reasons"][1:4:2] == ["the check of another rank"] * 2


def test_what_a_split_layer_saved_is_found(found):
    assert all(rank["is_found"] for rank in found["saved"])


def test_trees_have_the_gradients_of_the_whole_model(found):
    model = models.tiny(**LAYERS)
    models.dense_tree_backward(model, models.conversations(4))
    wanted = models.take_gradients(model)
    for rank in found["tree"]:
        assert models.distance(rank["gradients"], wanted) < FP64_BOUND


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3", "replicated_with_grad_allreduce"),
        ("step", "accepted: score"),
        ("fully_shard", "fully_shard or tensor parallelism"),
    ],
)
def test_what_is_not_exact_is_refused_on_every_rank(name, words, found):
    for rank in found[name]:
        assert words in rank["error"]
