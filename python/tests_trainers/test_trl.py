"""TRL's trainers with shared prompts, beside the unmodified ones."""

from __future__ import annotations

import peft
import pytest
import torch
from models import distance
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer
from trl_runs import (
    CONFIGS,
    Fp64Head,
    PlainGRPO,
    PlainRLOO,
    exact_all,
    made,
    run,
    same_logs,
    saved,
)

import dormouse.trl
from dormouse.hf import UnsupportedModelError
from dormouse.hf.check import Check
from dormouse.trl import UnsupportedTrainerError


@pytest.fixture
def exact(monkeypatch):
    exact_all(monkeypatch)


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


RLOO = {"plain": {}, "kl": {"beta": 0.1, "perturb": 0.02}}


@pytest.mark.parametrize("changes", RLOO.values(), ids=RLOO)
def test_rloo(changes, exact, runtime, tmp_path):
    changes = {"num_iterations": 2, "learning_rate": 3e-4, **changes}
    assert_equal(*both(PlainRLOO, tmp_path, runtime, **changes))


# A window of one microbatch; windows shorter and longer than a generation; an epoch's short last
# window; evaluation between steps.
WINDOWS = {
    "one": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "shorter": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "longer": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "unaligned": {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
    "epochs": {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": -1},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
}


@pytest.mark.parametrize("changes", WINDOWS.values(), ids=WINDOWS)
def test_windows(changes, exact, runtime, tmp_path):
    plain, shared = both(PlainGRPO, tmp_path, runtime, loss_type="bnpo", **changes)
    (_, wanted), (_, got) = plain, shared
    assert wanted.gradients and len(wanted.gradients) == len(got.gradients)
    for ours, dense in zip(got.gradients, wanted.gradients, strict=True):
        assert distance(ours, dense) < 1e-10
    assert not same_logs(wanted.logs, got.logs, 1e-6)


class Changing(PlainGRPO):
    """Leaves out columns that are padding in all rows of the second microbatch of a window, and the
    model in the last."""

    def _compute_loss(self, model, inputs):
        place = self._step % self.args.gradient_accumulation_steps
        if place == 3:
            return torch.zeros((), dtype=torch.float64, requires_grad=True)
        if place == 1:
            used = int(inputs["completion_mask"].any(0).sum())
            names = ("completion_ids", "completion_mask", "old_per_token_logps")
            cut = {name: inputs[name][:, :used] for name in names if inputs.get(name) is not None}
            inputs = inputs | cut
        return super()._compute_loss(model, inputs)


def test_microbatches_that_a_subclass_changes(exact, runtime, tmp_path):
    plain, shared = both(Changing, tmp_path, runtime, loss_type="bnpo", num_iterations=2)
    (_, wanted), (_, got) = plain, shared
    assert len(wanted.gradients) == len(got.gradients) == 3
    for ours, dense in zip(got.gradients, wanted.gradients, strict=True):
        assert dense and distance(ours, dense) < 1e-10


def lora(directory):
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora_and_its_reference(beta, exact, runtime, tmp_path):
    """The reference of an adapter is the model without it."""
    changes = {"beta": beta, "perturb": 0.05, "peft_config": lora(tmp_path), "num_iterations": 2}
    plain, shared = both(PlainGRPO, tmp_path, runtime, **changes)
    assert_equal(plain, shared)
    assert all("lora" in name for each in shared[1].gradients for name in each)


def counted(monkeypatch) -> list[str]:
    """The reasons of checks, as they run."""
    reasons, own = [], Check.run

    def run(self, reason):
        reasons.append(reason)
        return own(self, reason)

    monkeypatch.setattr(Check, "run", run)
    return reasons


def test_each_state_is_checked_once(exact, runtime, tmp_path, monkeypatch):
    """Although TRL switches gradient checkpointing off and on around every generation."""
    reasons = counted(monkeypatch)
    path = saved(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    changes = {"max_steps": 4, "num_iterations": 2, "beta": 0.1}
    run(trainer_class, model, tmp_path / "shared", **changes)
    assert reasons == ["the first step"] * 2, "of the policy and of the reference"


def test_generation_with_the_model_itself(runtime, tmp_path):
    """Nothing is recorded: TRL's own generation, and checkpointing as it is by default."""
    path = saved(tmp_path / "model", torch.float32)
    kinds = {"plain": GRPOTrainer, "shared": dormouse.trl.share(GRPOTrainer, runtime=runtime)}
    CONFIGS[GRPOTrainer] = GRPOConfig
    logs = []
    for name, kind in kinds.items():
        model = LlamaForCausalLM.from_pretrained(path)
        logs.append(run(kind, model, tmp_path / name, max_steps=2)[1].logs)
    assert not same_logs(*logs, 1e-3)


def test_nothing_shared_runs_as_in_the_trainer(exact, runtime, tmp_path, monkeypatch, caplog):
    """A microbatch of two in windows of one: TRL's shuffle rarely puts equal prompts together."""
    changes = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_steps": 4}
    (_, wanted), (trainer, got) = both(PlainGRPO, tmp_path, runtime, **changes)
    for ours, dense in zip(got.gradients, wanted.gradients, strict=True):
        assert distance(ours, dense) < 1e-10
    assert 0 < trainer.sharing.rows < 8, "of some steps, and not of others"
    notices = [r for r in caplog.records if "no prompt is shared" in r.getMessage()]
    assert len(notices) == 1


def test_bf16_is_followed(runtime, tmp_path):
    """Accelerate's autocast, TRL's default: as close to FP64 as the plain trainer is."""
    path = saved(tmp_path / "model", torch.float32)
    found = {}
    for name, kind, bf16 in [
        ("truth", PlainGRPO, False),
        ("plain", PlainGRPO, True),
        ("shared", dormouse.trl.share(PlainGRPO, runtime=runtime), True),
    ]:
        model = LlamaForCausalLM.from_pretrained(path)
        _, recorder = run(kind, model, tmp_path / name, bf16=bf16, max_steps=1)
        found[name] = recorder.gradients[0]
    own = distance(found["plain"], found["truth"])
    assert 1e-3 < own < 0.1, "autocast acts, and its error is small"
    assert distance(found["shared"], found["truth"]) <= 1.25 * own


def recording(kind):
    """Returns a subclass that keeps the log-probabilities that losses read."""

    class Recording(kind):
        def _get_per_token_logps_and_entropies(self, *args, **named):
            found = super()._get_per_token_logps_and_entropies(*args, **named)
            vars(self).setdefault("read", []).append(found[0].detach())
            return found

    return Recording


def sharp(path) -> LlamaForCausalLM:
    """With logits of about 20, which BF16 rounds by 0.06. Its layers add nothing to the hidden
    states, so that the head alone rounds."""
    model = LlamaForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def test_a_head_in_fp32_is_followed_under_autocast(runtime, tmp_path):
    """TRL runs it outside autocast."""
    path = saved(tmp_path / "model", torch.float32)
    found = {}
    for name, kind, wide in [
        ("narrow", PlainGRPO, False),
        ("plain", PlainGRPO, True),
        ("shared", dormouse.trl.share(PlainGRPO, runtime=runtime), True),
    ]:
        changes = {"bf16": True, "max_steps": 1, "cast_lm_head_to_fp32": wide}
        trainer, _ = run(recording(kind), sharp(path), tmp_path / name, **changes)
        found[name] = torch.cat([each.flatten() for each in trainer.read])
    assert trainer.sharing.rows
    assert (found["narrow"] - found["plain"]).abs().max() > 1e-2, "the option acts"
    assert (found["shared"] - found["plain"]).abs().max() < 1e-3


class Hotter:
    """A head with another temperature than the trainer says."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *others):
        return Fp64Head.apply(hidden, weight, bias, labels, 0.9 * temperature, *others)


class Louder:
    """A head whose values are right and whose gradients are not."""

    @staticmethod
    def apply(hidden, *others):
        return Fp64Head.apply(1.01 * hidden - 0.01 * hidden.detach(), *others)


@pytest.mark.parametrize(
    ("head", "name"), [(Hotter, "log-probabilities"), (Louder, "gradients")]
)
def test_what_the_trainer_does_otherwise_is_refused(
    head, name, exact, runtime, tmp_path, monkeypatch
):
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", head)
    path = saved(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match=f"own {name} of a small batch"):
        run(trainer_class, model, tmp_path / "shared")


PRECISIONS = {
    "fp32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
}


@pytest.mark.parametrize(("dtype", "bf16"), PRECISIONS.values(), ids=PRECISIONS)
def test_positions_of_padded_rows_are_refused(dtype, bf16, runtime, tmp_path):
    """TRL numbers the columns: with learned positions a padded row's log-probabilities depend on
    its padding. Shared prompts begin at position 0."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = GPT2LMHeadModel(config).to(dtype)
    with torch.no_grad():
        # By little, which rounding to BF16 may hide.
        model.transformer.wpe.weight.mul_(0.03)
    # As with adapters: its gradients would tell.
    model.transformer.wpe.requires_grad_(False)
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match="padded on the left"):
        run(trainer_class, model, tmp_path / "shared", bf16=bf16)


class Cooling(PlainGRPO):
    """By so little that BF16 may hide it. Its head keeps the temperature it was made with."""

    def training_step(self, *args, **named):
        if self._step == 4:
            self.temperature = 0.98
        return super().training_step(*args, **named)


def test_another_temperature_than_the_heads_is_refused(runtime, tmp_path):
    path = saved(tmp_path / "model", torch.float32)
    model = LlamaForCausalLM.from_pretrained(path)
    trainer_class = dormouse.trl.share(Cooling, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match="temperature is 0.98"):
        run(trainer_class, model, tmp_path / "shared", temperature=1.0, bf16=True)


def test_lora_dropout_is_refused_on_the_prompt(runtime, tmp_path):
    path = saved(tmp_path / "model", torch.float32)
    config = lora(tmp_path)
    config.lora_dropout = 0.1
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    model = LlamaForCausalLM.from_pretrained(path)
    with pytest.raises(UnsupportedModelError, match="dropout 0.1"):
        # Before the first rollouts.
        made(trainer_class, model, tmp_path / "refused", peft_config=config)
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime, prompt_dropout=False)
    model = LlamaForCausalLM.from_pretrained(path)
    trainer, _ = run(trainer_class, model, tmp_path / "accepted", peft_config=config)
    assert trainer.sharing.rows


@pytest.mark.parametrize("name", ["use_liger_kernel", "torch_compile"])
def test_refused_by_name(name, runtime, tmp_path, monkeypatch):
    # torch_compile sets it for good.
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    path = saved(tmp_path / "model", torch.float32)
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    model = LlamaForCausalLM.from_pretrained(path)
    with pytest.raises(UnsupportedTrainerError, match=f"{name}.*accepted"):
        run(trainer_class, model, tmp_path / "shared", **{name: True})


def test_a_backend_of_dynamo_in_the_environment_is_refused(runtime, tmp_path, monkeypatch):
    """As `accelerate launch --dynamo_backend` sets it."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    path = saved(tmp_path / "model", torch.float32)
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match='INDUCTOR.*accepted: dynamo_backend "no"'):
        made(trainer_class, LlamaForCausalLM.from_pretrained(path), tmp_path / "shared")


def test_a_moe_with_an_auxiliary_loss_is_refused(runtime, tmp_path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match="router_aux_loss_coef=0.0"):
        run(trainer_class, Qwen3MoeForCausalLM(config), tmp_path / "refused")
    model = Qwen3MoeForCausalLM(config)
    trainer, _ = run(trainer_class, model, tmp_path / "accepted", router_aux_loss_coef=0.0)
    assert trainer.sharing.rows


STEPS = 20


def test_twenty_steps_of_adam_in_fp32(runtime, tmp_path, monkeypatch):
    """Measured from the plain trainer in FP64, by the bounds of docs/method.md §10: the first
    gradient's as a whole, and for what Adam made of its rounding the bound of single parameters."""
    path = saved(tmp_path / "model", torch.float32)
    settings = {
        "optim": "adamw_torch",
        "learning_rate": 1e-4,
        "max_grad_norm": 0.5,
        "loss_type": "dapo",
        "num_iterations": 2,
        "max_steps": STEPS,
    }

    def moved(name, kind, dtype=torch.float32, **changes):
        model = LlamaForCausalLM.from_pretrained(path, dtype=dtype)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        _, recorder = run(kind, model, tmp_path / name, **settings, **changes)
        own = {n: (p.detach() - start[n]).double() for n, p in model.named_parameters()}
        gradient = {n: g.double() for n, g in recorder.gradients[0].items()}
        return (gradient, own), recorder.logs

    plain, logs = moved("plain", PlainGRPO)
    shared, shared_logs = moved("shared", dormouse.trl.share(PlainGRPO, runtime=runtime))
    other = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    split, _ = moved("split", PlainGRPO, **other)
    with monkeypatch.context() as patches:
        exact_all(patches)
        truth, _ = moved("truth", PlainGRPO, torch.float64)
    assert not same_logs(logs, shared_logs, 1e-3)
    for what, number, bound in (("the first gradient", 0, 1.25), (f"{STEPS} updates", 1, 4)):
        own = distance(plain[number], truth[number])
        ours = distance(shared[number], truth[number])
        other = distance(split[number], truth[number])
        print(f"{what}: plain {own:.2e}, with other microbatches {other:.2e}, shared {ours:.2e}")
        assert 0 < own < 0.1 and 0 < ours <= bound * own
