"""The adapter for TRL with a stand-in for its trainers; python/tests_trainers has the real ones."""

from __future__ import annotations

import contextlib
import difflib
import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import distance, take_gradients, tiny
from test_token_scores import a_batch, dense, loss_of, padded
from transformers import BeamConfig, BeamForCausalLM

import dormouse.trl
from dormouse.errors import StateError
from dormouse.hf import sharding
from dormouse.hf.token_scores import ScoreCall
from dormouse.trainers.own_forward import own_forward
from dormouse.trl import UnsupportedTrainerError, scores

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trl"
SCRIPTS = ("grpo.py", "grpo_shared.py")
ROWS = (slice(0, 2), slice(2, 5), slice(5, 7))


class Trainer:
    """Goes through microbatches as TRL does, with a loss of each microbatch's own."""

    _is_vlm = aux_loss_enabled = False
    temperature = 0.7

    def __init__(self, model, rows=ROWS, windows=(3,)):
        ids, mask, self._keep = a_batch()
        self.model, self._windows, self._step = model, windows, 0
        self.args = SimpleNamespace(
            steps_per_generation=len(rows), temperature=self.temperature
        )
        self.accelerator = SimpleNamespace(
            autocast=contextlib.nullcontext,
            sync_gradients=False,
            device=torch.device("cpu"),
            num_processes=1,
            gradient_state=SimpleNamespace(plugin_kwargs={}),
            state=SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=SimpleNamespace(value="NO"))),
        )
        split = ids.shape[1] - self._keep
        self._buffered_inputs = [
            {
                "prompt_ids": ids[each, :split],
                "prompt_mask": mask[each, :split],
                "completion_ids": ids[each, split:],
                "completion_mask": mask[each, split:],
            }
            for each in rows
        ]
        self.own_calls = 0

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        pixel_values=None,
    ):
        self.own_calls += 1
        found = dense(model, input_ids, attention_mask, logits_to_keep, self.temperature)
        return found[0], found[1] if compute_entropy else None, None

    def batch(self, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        return ids, torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)

    def loss(self, inputs):
        ids, mask = self.batch(inputs)
        logps, entropies, aux = self._get_per_token_logps_and_entropies(
            self.model, ids, mask, self._keep, compute_entropy=True, pixel_values=None
        )
        assert aux is None
        return loss_of(logps, entropies, mask[:, -self._keep :])

    def training_step(self, model):
        self.loss(self._buffered_inputs[self._step % len(self._buffered_inputs)]).backward()
        self._step += 1

    def train(self):
        """Returns the gradients of each window."""
        found = []
        for count in self._windows:
            self.current_gradient_accumulation_steps = count
            for number in range(count):
                self.accelerator.sync_gradients = number == count - 1
                self.training_step(self.model)
            found.append(take_gradients(self.model))
        return found


def both(runtime, **settings):
    wanted = Trainer(tiny(), **settings).train()
    trainer = dormouse.trl.share(Trainer, runtime=runtime, microbatch_tokens=7)(tiny(), **settings)
    return wanted, trainer.train(), trainer


@pytest.mark.parametrize(
    ("windows", "prompts"),
    [
        # Rows of two prompts meet in one window; the row without a response is in no count.
        ((3,), 2),
        # The first microbatch shares nothing; the prompts of the other two are of both kinds.
        ((1, 2), 2),
        # A generation is used twice.
        ((3, 3), 4),
        # A window that is longer than a generation is one of its own after it; the last microbatch
        # has one row with a response.
        ((5, 1), 4),
    ],
)
def test_gradients_are_those_of_the_trainer(windows, prompts, runtime):
    wanted, got, trainer = both(runtime, windows=windows)
    for ours, own in zip(got, wanted, strict=True):
        assert distance(ours, own) < 1e-10
    assert trainer.sharing.prompts == prompts


def test_without_a_graph(runtime):
    trainer = dormouse.trl.share(Trainer, runtime=runtime)(tiny())
    ids, mask, keep = a_batch()
    wanted = dense(trainer.model, ids, mask, keep, trainer.temperature)
    with torch.no_grad():
        logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, keep, compute_entropy=True
        )
    torch.testing.assert_close(logps, wanted[0].detach(), rtol=0, atol=1e-11)
    torch.testing.assert_close(entropies, wanted[1].detach(), rtol=0, atol=1e-11)
    assert trainer.own_calls == 1, "by the comparison"
    assert trainer.sharing.rows == 0


def test_microbatches_that_a_subclass_changes_run_by_themselves(runtime):
    """The window's other rows are not those of its scores."""

    class Changing(Trainer):
        def batch(self, inputs):
            ids, mask = super().batch(inputs)
            return ids.flip(0), mask.flip(0)

    wanted = Changing(tiny()).train()
    trainer = dormouse.trl.share(Changing, runtime=runtime)(tiny())
    assert distance(trainer.train()[0], wanted[0]) < 1e-10


class Trimming(Trainer):
    """Leaves out columns that are padding in all rows of a microbatch but the first."""

    def batch(self, inputs):
        ids, mask = super().batch(inputs)
        if inputs is not self._buffered_inputs[0]:
            used = mask.any(0).nonzero()[0]
            ids, mask = ids[:, used:], mask[:, used:]
        return ids, mask


class Constant(Trainer):
    """Computes the loss of some microbatches without the model."""

    left_out = (2,)

    def loss(self, inputs):
        if self._step % len(self._buffered_inputs) in self.left_out:
            return torch.zeros((), requires_grad=True)
        return super().loss(inputs)


class Detached(Trainer):
    """The loss of the last microbatch has a graph without the model."""

    def loss(self, inputs):
        found = super().loss(inputs)
        return found.detach().requires_grad_() if self._step % 3 == 2 else found


class Retrying(Trainer):
    """Repeats a microbatch whose loss failed."""

    fails_at = 1

    def training_step(self, model):
        self._tries = 2 if self._step == self.fails_at else 1
        try:
            super().training_step(model)
        except ArithmeticError:
            super().training_step(model)

    def loss(self, inputs):
        found = super().loss(inputs)
        self._tries -= 1
        if self._tries > 0:
            raise ArithmeticError
        return found


CHANGING = {
    "trimmed": (Trimming, {}),
    "without the model": (Constant, {}),
    "without the model, then with": (Constant, {"left_out": (1,)}),
    "with the model in the first alone": (Constant, {"left_out": (1, 2)}),
    "unread": (Detached, {}),
    "retried": (Retrying, {}),
    "retried, the last": (Retrying, {"fails_at": 2}),
}


@pytest.mark.parametrize(("kind", "attributes"), CHANGING.values(), ids=CHANGING)
def test_gradients_that_wait_are_run_if_the_window_is_left(kind, attributes, runtime):
    """Each window has those of its own microbatches, and all of them."""
    kind = type(kind.__name__, (kind,), attributes)
    wanted = kind(tiny(), windows=(3, 3)).train()
    got = dormouse.trl.share(kind, runtime=runtime)(tiny(), windows=(3, 3)).train()
    for ours, own in zip(got, wanted, strict=True):
        assert own and distance(ours, own) < 1e-10


def test_gradients_that_come_after_the_passes_are_refused(runtime):
    """Both calls of the first microbatch have their backward after the second."""

    class Calling(Trainer):
        def loss(self, inputs):
            found = super().loss(inputs)
            return found + super().loss(self._buffered_inputs[2]) if self._step == 0 else found

    trainer = dormouse.trl.share(Calling, runtime=runtime)(tiny())
    with pytest.raises(StateError, match="backward after the window's passes did.*accepted"):
        trainer.train()


@pytest.mark.parametrize("left_out", [(2,), (1, 2)])
def test_gradients_that_would_not_be_reduced_are_refused(left_out, runtime, monkeypatch):
    """DistributedDataParallel reduces in a backward of its model, and the last has none."""
    kind = type("Constant", (Constant,), {"left_out": left_out})
    trainer = dormouse.trl.share(kind, runtime=runtime)(tiny())
    own = SimpleNamespace(process_group_of=lambda model: "ranks", unwrapped=sharding.unwrapped)
    monkeypatch.setattr(scores, "sharding", own)
    with pytest.raises(StateError, match="would not be reduced.*accepted"):
        trainer.train()
    assert not take_gradients(trainer.model)


def test_a_backward_that_failed_is_not_repeated(runtime, monkeypatch):
    """Gradients of the other microbatches went into it."""
    trainer = dormouse.trl.share(Retrying, runtime=runtime)(tiny())
    trainer.fails_at = None
    own, calls = ScoreCall.gradients, []

    def gradients(call, of_values):
        if trainer._step == 2 and not calls:
            calls.append(call)
            raise ArithmeticError
        return own(call, of_values)

    monkeypatch.setattr(ScoreCall, "gradients", gradients)
    with pytest.raises(StateError, match="last part failed.*accepted"):
        trainer.train()
    assert calls


def test_a_window_that_was_left_is_forgotten(runtime):
    """An error between microbatches: the next window begins anew."""
    wanted = Trainer(tiny()).train()
    trainer = dormouse.trl.share(Trainer, runtime=runtime)(tiny())
    trainer.current_gradient_accumulation_steps = 3
    trainer.training_step(trainer.model)
    trainer._step = 0
    assert distance(trainer.train()[0], wanted[0]) < 1e-10


def test_training_again_forgets_the_window_that_was_left(runtime):
    """The trainer drops the gradients of its microbatches, so those that wait are dropped."""

    class Interrupted(Trainer):
        def train(self):
            if self._step == 0:
                self.current_gradient_accumulation_steps = 3
                self.training_step(self.model)
                self.model.zero_grad()
                return None
            return super().train()

    def run(trainer):
        trainer.train()
        return trainer.train()

    wanted = run(Interrupted(tiny()))
    got = run(dormouse.trl.share(Interrupted, runtime=runtime)(tiny()))
    assert distance(got[0], wanted[0]) < 1e-10


def test_another_temperature_is_refused(runtime):
    """However little it differs: TRL's head keeps its own."""
    trainer = dormouse.trl.share(Trainer, runtime=runtime)(tiny(), windows=(3,))
    trainer.train()
    trainer.temperature = 0.699
    with pytest.raises(UnsupportedTrainerError, match="temperature is 0.699.*0.7 that"):
        trainer.train()


def test_nothing_shared_is_said_once(runtime, caplog):
    rows = [slice(i, i + 1) for i in range(5)]
    wanted, got, trainer = both(runtime, rows=rows, windows=(1,) * 5)
    for ours, own in zip(got, wanted, strict=True):
        assert distance(ours, own) < 1e-12
    assert trainer.own_calls == 5 and trainer.sharing.rows == 0
    (notice,) = caplog.records
    assert "no prompt is shared" in notice.getMessage()


def test_a_batch_that_cannot_be_shared_is_said_once(runtime, caplog):
    """Whichever of its rows has the prompt of one token."""
    trainer = dormouse.trl.share(Trainer, runtime=runtime)(tiny())
    ids, mask, keep = padded([1, 11, 11], [4, 6, 3])
    for order in ([0, 1, 2], [1, 2, 0], [1, 0, 2]):
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(
                trainer.model, ids[order], mask[order], keep
            )
    assert trainer.own_calls == 3
    (notice,) = caplog.records
    assert "runs as in the trainer: row 0" in notice.getMessage()


def otherwise(change):
    """A trainer that changes its log-probabilities."""

    class Otherwise(Trainer):
        def _get_per_token_logps_and_entropies(
            self,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=None,
            compute_entropy=False,
            compute_aux_loss=False,
        ):
            logps, *rest = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, compute_entropy=compute_entropy
            )
            return change(logps), *rest

    return Otherwise


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda logps: 1.001 * logps, "log-probabilities"),
        (lambda logps: 1.001 * logps - 0.001 * logps.detach(), "gradients"),
    ],
)
def test_a_trainer_that_computes_otherwise_is_refused(change, what, runtime):
    trainer = dormouse.trl.share(otherwise(change), runtime=runtime)(tiny())
    with pytest.raises(UnsupportedTrainerError, match=f"own {what} of a small batch"):
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_class_with_another_method_is_refused():
    class Other:
        def _get_per_token_logps_and_entropies(self, model, input_ids):
            """Of another release."""

    for each in (Other, object):
        with pytest.raises(UnsupportedTrainerError, match="accepted: GRPOTrainer and RLOOTrainer"):
            dormouse.trl.share(each)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"_is_vlm": True}, "images; accepted: a tokenizer"),
        ({"aux_loss_enabled": True}, "router_aux_loss_coef=0.0"),
        ({"is_fsdp_enabled": True}, "sharded by FSDP"),
        ({"is_deepspeed_enabled": True}, "sharded by FSDP or DeepSpeed"),
        ({"is_distributed_loading_by_transformers": True}, "accepted: .* every rank loads whole"),
    ],
)
def test_trainers_refused_by_name(attributes, message):
    trainer_class = type("Trainer", (Trainer,), attributes)
    with pytest.raises(UnsupportedTrainerError, match=message):
        dormouse.trl.share(trainer_class)(tiny())


@pytest.mark.parametrize(
    "values",
    [
        {"attn_temperature_tuning": True},
        {"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}},
        {"rope_parameters": {"full_attention": None, "own": {"llama_4_scaling_beta": 0.1}}},
        {"rope_parameters": {"rope_theta": 1e4, "own": {"llama_4_scaling_beta": 0.1}}},
    ],
)
def test_attention_scaled_by_positions_is_refused(values):
    """Only rows that are longer than those of the comparison would show it."""
    model = tiny()
    for name, value in values.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedTrainerError, match="without attn_temperature_tuning"):
        dormouse.trl.share(Trainer)(model)


def test_queries_scaled_by_positions_are_refused():
    """By few parts in a thousand, in every row: BF16 does not show it."""
    config = BeamConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
    )
    with pytest.raises(UnsupportedTrainerError, match="accepted: .*attention_scaling"):
        dormouse.trl.share(Trainer)(BeamForCausalLM(config))


def test_images_are_refused(runtime):
    trainer = dormouse.trl.share(Trainer, runtime=runtime)(tiny())
    ids, mask, keep = a_batch()
    with pytest.raises(UnsupportedTrainerError, match="pixel_values given; accepted: text"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, keep, pixel_values=torch.zeros(1)
        )


def test_own_forward_leaves_the_model_as_it_was():
    """Wrappers of the forward and what transformers attaches for checkpointing come back."""
    model = tiny()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    inner = model.forward

    @functools.wraps(type(model).forward)
    def wrapper(*args, **named):
        return inner(*args, **named)

    model.forward = wrapper
    embedding = model.get_input_embeddings()
    other = embedding.register_forward_hook(lambda *_: None)
    before = {module: dict(vars(module)) for module in model.modules()}
    hooks = list(embedding._forward_hooks.items())
    with pytest.raises(KeyError), own_forward(model):
        assert "forward" not in vars(model)
        assert not model.model.gradient_checkpointing
        assert list(embedding._forward_hooks) == [other.id]
        raise KeyError
    assert {module: dict(vars(module)) for module in model.modules()} == before
    assert list(embedding._forward_hooks.items()) == hooks


def test_a_forward_that_wraps_no_other_stays():
    model = tiny()
    model.forward = lambda *args, **named: None
    with own_forward(model):
        assert "forward" in vars(model)


def test_the_examples_differ_in_ten_lines_at_most():
    plain, shared = ((EXAMPLES / name).read_text().splitlines() for name in SCRIPTS)
    assert max(len(plain), len(shared)) <= 60
    changed = [
        line
        for line in difflib.unified_diff(plain, shared, n=0, lineterm="")
        if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
    ]
    assert 0 < len(changed) <= 10
    assert any("dormouse.trl.share(GRPOTrainer)(" in line for line in changed)
