"""What the replay is made of: batches, ways, distances, rows, the picture."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import plot
import pytest
import replay_figures as figures
import torch
from distances import against_truth, distance, norm, parameters_of, summary
from recorded import Batch, Size, batch_of, batches
from transformers import LlamaConfig, LlamaForCausalLM
from updates import FP32, WAYS, Settings
from ways import by_rows, dense_log_probabilities, row_losses, whole

from dormouse.demo import trace

SIZE = Size(prompt_tokens=5, responses=2, response_tokens=4)
SETTINGS = Settings("", 2, 30, FP32, {"prompt_tokens": 5, "responses": 2, "response_tokens": 4})


def group(*responses: list[int]) -> trace.RolloutGroup:
    rollouts = [
        trace.Rollout(tokens, "", [-1.0] * len(tokens), 1.0, advantage)
        for tokens, advantage in zip(responses, (1.5, -0.5, 0.25), strict=False)
    ]
    return trace.RolloutGroup("g", "w", "q", list(range(10, 20)), rollouts)


def batch() -> Batch:
    return batch_of(group([1, 2, 3, 4, 5, 6], [7, 8], [9]), SIZE)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).double()


def test_a_batch_has_the_end_of_the_prompt_and_the_beginning_of_responses():
    made = batch()
    assert made.ids.tolist() == [[15, 16, 17, 18, 19, 1, 2, 3, 4], [15, 16, 17, 18, 19, 7, 8, 0, 0]]
    assert made.mask.tolist() == [[1] * 9, [1] * 7 + [0] * 2]
    assert made.keep == 4
    assert made.prompt.tolist() == [15, 16, 17, 18, 19]
    assert made.advantages.tolist() == [1.5, -0.5]
    row = made.row(1)
    assert row.ids.tolist() == [[15, 16, 17, 18, 19, 7, 8]]
    assert (row.keep, row.labels.tolist(), row.advantages.tolist()) == (2, [[7, 8]], [-0.5])


def test_every_recorded_group_has_a_batch():
    found = batches(Size(prompt_tokens=64, responses=4, response_tokens=32))
    assert len(found) == len(trace.read().groups)
    assert all(each.ids.shape[0] == 4 and each.keep <= 32 for each in found)


@pytest.mark.parametrize(
    "changes",
    [{"prompt_tokens": 11}, {"prompt_tokens": 1}, {"responses": 4}, {"response_tokens": 0}],
)
def test_a_size_that_was_not_recorded_is_refused(changes):
    with pytest.raises(ValueError, match="accepted"):
        batch_of(group([1, 2], [3], [4]), replace(SIZE, **changes))


def test_the_loss_is_clipped_weighted_and_averaged_over_tokens():
    made = batch()
    old = torch.zeros(2, 4, dtype=torch.float64)
    # Ratios of 2 and 1/2. Padding has some too.
    values = torch.tensor([[2.0] * 4, [0.5] * 4], dtype=torch.float64).log()
    losses = row_losses(values, old, made)
    assert losses.tolist() == pytest.approx([-1.2 * 1.5, 0.8 * 0.5])
    changed = values.clone()
    changed[1, 2:] = 3.0
    assert torch.equal(row_losses(changed, old, made), losses)


def test_rows_one_by_one_have_the_gradients_of_the_padded_batch():
    model, made = tiny(), batch()
    with torch.no_grad():
        old = dense_log_probabilities(model, made) + 0.1
    found = []
    for way in (whole, by_rows):
        loss = way(lambda each: dense_log_probabilities(model, each))(made, old)
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad(set_to_none=True)
    (loss, gradients), (by_row, others) = found
    assert by_row == pytest.approx(loss, rel=1e-12)
    assert distance(others, gradients) < 1e-12 * norm(gradients)


def test_distances_of_parameters():
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}
    other = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([[0.0]])}
    assert distance(one, other) == pytest.approx(13**0.5)
    assert norm(other) == pytest.approx(17**0.5)
    found = summary(one, other)
    assert found == pytest.approx({"max": 3.0, "mean": 5 / 3, "rms": (13 / 3) ** 0.5})
    other["a"][1] = torch.nan
    assert math.isnan(summary(one, other)["max"])
    model = tiny()
    assert parameters_of(model)["lm_head.weight"].data_ptr() == model.lm_head.weight.data_ptr()


def test_the_movement_is_compared_and_not_the_weights():
    start = {"a": torch.full((2,), 100.0)}
    truth = {"a": torch.tensor([101.0, 102.0], dtype=torch.float64)}
    dense, other = {"a": torch.tensor([101.5, 102.0])}, {"a": torch.tensor([101.0, 103.0])}
    found = against_truth(start, truth, dense, other)
    assert found["dense_global"] == pytest.approx(0.5 / 5**0.5)
    assert found["ratio_global"] == pytest.approx(2.0)
    assert not found["within_bounds"]


def an_update(**losses: float) -> dict:
    return {
        "loss": losses,
        "norm": {name: 2.0 + value for name, value in losses.items()},
        "from_truth": dict.fromkeys(WAYS[:-1], 1e-6),
        "from_dense": {"split": 1e-7, "shared": 2e-7},
    }


UPDATES = [
    an_update(dense=1.0, split=1.0, shared=1.25, fp64=1.0),
    an_update(dense=2.0, split=2.5, shared=2.0, fp64=1.5),
]


def test_norms_are_compared_where_all_ratios_are_clipped():
    update = {"norm": {"dense": 0.0, "split": 0.0, "shared": 0.5}}
    assert figures.apart(update, "norm", "split") == 0.0
    assert figures.apart(update, "norm", "shared") == 0.5


def an_end() -> dict:
    def samples(*tokens: int) -> list[dict]:
        return [{"tokens": [token], "reward": float(token)} for token in tokens]

    error = {"ratio_median": 1.0, "ratio_p99": 2.0, "ratio_max": 3.0, "within_bounds": True}
    return {
        "from_dense": {
            "split": {"max": 4.0, "mean": 1.0, "rms": 2.0},
            "shared": {"max": 5.0, "mean": 1.5, "rms": 3.0},
        },
        "from_truth": {
            "split": {**error, "ratio_global": 0.5},
            "shared": {**error, "ratio_global": 1.25},
        },
        "samples": {
            "start": samples(0, 0),
            "dense": samples(1, 2),
            "split": samples(1, 2),
            "shared": samples(1, 4),
            "fp64": samples(0, 2),
        },
    }


def test_rows_compare_shared_with_the_other_split():
    rows = {row.name: row for row in figures.rows(SETTINGS, UPDATES, an_end())}
    assert list(rows) == figures.names(FP32)
    assert rows["replay_parameters_over_truth_fp32"].met is True
    assert rows["replay_parameters_over_split_fp32"].ours == 1.5
    assert rows["replay_parameters_over_split_fp32"].met is False
    assert rows["replay_parameters_max_fp32"].peers == {"split": 4.0}
    assert rows["replay_loss_rms_fp32"].ours == pytest.approx(0.25 / 2**0.5)
    assert rows["replay_norm_rms_fp32"].peers["split"] == pytest.approx(0.5 / 4.0 / 2**0.5)
    loss = rows["replay_loss_over_truth_fp32"]
    assert loss.ours == pytest.approx((0.25**2 + 0.5**2) ** 0.5 / 0.5)
    assert rows["replay_norm_over_truth_fp32"].peers["split"] == pytest.approx(2.0)
    assert rows["replay_reward_fp32"].ours == 2.5
    assert rows["replay_reward_fp32"].peers["dense"] == 1.5
    assert rows["replay_equal_samples_fp32"].ours == 0.5
    assert rows["replay_equal_samples_fp32"].peers["split"] == 1.0


def test_outside_the_bounds_no_ratio_meets_a_bar():
    end = an_end()
    end["from_truth"]["shared"]["within_bounds"] = False
    row = figures.rows(SETTINGS, UPDATES, end)[0]
    assert (row.ours, row.met) == (None, False)
    assert "shared: global 1.250" in row.how


def test_the_picture_is_an_image_for_light_and_dark():
    text = figures.picture(SETTINGS, UPDATES)
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for label in ("padded batch", "row by row", "shared prompts"):
        assert label in text


def test_a_logarithmic_panel_leaves_out_what_is_not_positive():
    curve = plot.Curve("one", 0, [0.0, 1e-6, float("nan"), 1e-3])
    text = plot.svg("t", "s", "step", [plot.Panel("p", [curve], is_log=True)])
    ET.fromstring(text)
    points = text.split('d="M')
    assert any(each.split('"')[0].count("L") == 1 for each in points)
    assert all(f"1e{power}" in text for power in range(-6, -2))
    assert "nan" not in text


def test_a_panel_of_one_value_has_an_axis():
    text = plot.svg("t", "s", "step", [plot.Panel("p", [plot.Curve("<one>", 0, [5.0])])])
    ET.fromstring(text)
    assert "&lt;one&gt;" in text
