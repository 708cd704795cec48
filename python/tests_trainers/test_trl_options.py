"""Options of TRL's trainer that reach the log-probabilities: as in the plain trainer, or refused."""

from __future__ import annotations

import contextlib
import random

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from models import distance
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import LlamaForCausalLM, Ministral3Config, Ministral3ForCausalLM
from trl_runs import PlainGRPO, exact_all, made, run, same_logs, saved

import dormouse.trl
from dormouse.hf import UnsupportedModelError
from dormouse.trl import UnsupportedTrainerError


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    exact_all(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


def plain_model(path):
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)


def tied(path):
    model = plain_model(path)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def adapted(path):
    """With a trained adapter: TRL's reference is a copy of it, and not the model without it."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(plain_model(path), config)


class Sampled(PlainGRPO):
    """As if vLLM had drawn the tokens, by log-probabilities that are not the model's."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.use_vllm = True

    def _generate_single_turn(self, prompt_ids, *others, **named):
        completions, _ = super()._generate_single_turn(prompt_ids, *others, **named)
        draw = random.Random(3)
        return completions, [[draw.uniform(-5.1, -4.1) for _ in each] for each in completions]


KL = {"beta": 0.1, "perturb": 0.02}
OPTIONS = {
    "off_policy": {"off_policy_mask_threshold": 1e-3},
    "kl_bias": {**KL, "use_bias_correction_kl": True},
    "synchronised_reference": {
        **KL,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
    },
    "adapted_reference": {**KL, "make": adapted},
    "adaptive_entropy": {
        "loss_type": "bnpo",
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 4.0,
    },
    "entropy_of_a_quantile": {
        "loss_type": "dapo",
        "top_entropy_quantile": 0.3,
        "entropy_coef": 0.1,
    },
    "sampled_tokens": {
        "kind": Sampled,
        "loss_type": "dapo",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.2,
    },
    "sampled_sequences": {
        "kind": Sampled,
        "loss_type": "grpo",
        "vllm_importance_sampling_mode": "sequence_mask",
    },
    "sampled_vespo": {
        "kind": Sampled,
        "loss_type": "vespo",
        "vllm_importance_sampling_mode": "token_truncate",
    },
    "windows_of_a_part": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "tied": {"make": tied},
    "evaluated_kl": {
        **KL,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    },
}


def both(directory, path, runtime, *, kind=PlainGRPO, make=plain_model, use=run, **changes):
    """``use(trainer_class, model, directory, **changes)``, of the plain class and the shared."""
    changes = {"num_iterations": 2, **changes}
    plain = use(kind, make(path), directory / "plain", **changes)
    shared_class = dormouse.trl.share(kind, runtime=runtime)
    return plain, use(shared_class, make(path), directory / "shared", **changes)


def assert_equal(plain, shared):
    (_, wanted), (trainer, got) = plain, shared
    assert wanted.gradients
    for ours, dense in zip(got.gradients, wanted.gradients, strict=True):
        assert distance(ours, dense) < 1e-10
    assert not same_logs(wanted.logs, got.logs, 1e-6)
    assert trainer.sharing.rows


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_as_in_the_trainer(changes, path, runtime, tmp_path):
    plain, shared = both(tmp_path, path, runtime, **changes)
    assert_equal(plain, shared)
    if changes.get("kind") is Sampled:
        name = "sampling/importance_sampling_ratio/mean"
        assert shared[1].logs[0][name] != 1.0, "the correction acts"


class Interrupted(PlainGRPO):
    """Ctrl-C after its second microbatch."""

    def training_step(self, *args, **named):
        if self._step == 2 and not vars(self).setdefault("was_interrupted", False):
            self.was_interrupted = True
            raise KeyboardInterrupt
        return super().training_step(*args, **named)


def test_training_goes_on_after_an_interrupt(path, runtime, tmp_path):
    """The gradients of the microbatches before it are dropped, as the trainer drops them."""

    def use(*arguments, **changes):
        trainer, recorder = made(*arguments, **changes)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        return trainer, recorder

    plain, shared = both(tmp_path, path, runtime, kind=Interrupted, use=use)
    assert_equal(plain, shared)


def test_a_checkpoint_is_resumed(path, runtime, tmp_path):
    def use(kind, model, directory, **changes):
        run(kind, model, directory, max_steps=1, **changes)
        trainer, recorder = made(kind, model, directory, max_steps=3, **changes)
        trainer.train(resume_from_checkpoint=True)
        return trainer, recorder

    changes = {"save_strategy": "steps", "save_steps": 1}
    plain, shared = both(tmp_path, path, runtime, use=use, **changes)
    assert_equal(plain, shared)
    assert len(shared[1].gradients) == 2


def dropping(path):
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float64, attention_dropout=0.1)


REFUSED = {
    "noise": ({"neftune_noise_alpha": 5.0}, UnsupportedModelError, "it is random"),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes, error, message, path, runtime, tmp_path):
    changes = {"num_iterations": 2, **changes}
    kind, make = changes.pop("kind", PlainGRPO), changes.pop("make", plain_model)
    with pytest.raises(error, match=message):
        run(dormouse.trl.share(kind, runtime=runtime), make(path), tmp_path, **changes)


def test_dropout_is_refused_before_the_first_rollouts(path, runtime, tmp_path):
    """Although TRL's constructor leaves the model in evaluation mode."""
    with pytest.raises(UnsupportedModelError, match="attention_dropout 0.1"):
        made(dormouse.trl.share(PlainGRPO, runtime=runtime), dropping(path), tmp_path)


def test_a_gpu_without_a_runtime_is_refused_before_the_first_rollouts(
    path, tmp_path, monkeypatch
):
    class OnGpu(PlainGRPO):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            monkeypatch.setattr(Accelerator, "device", torch.device("cuda", 0))

    with pytest.raises(UnsupportedTrainerError, match="cuda:0 and share\\(\\) has no runtime"):
        made(dormouse.trl.share(OnGpu), plain_model(path), tmp_path)


def test_dropout_that_the_trainer_disables(path, runtime, tmp_path):
    changes = {"make": dropping, "disable_dropout": True}
    with pytest.raises(UnsupportedModelError, match="attention_dropout 0.1"):
        # TRL sets modules of dropout to 0; this rate is a number in the attention.
        both(tmp_path, path, runtime, **changes)


def test_attention_scaled_by_positions_is_refused(runtime, tmp_path):
    """From position 16 on: rows of the comparison are shorter."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    config = Ministral3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=None,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        rope_parameters=rope,
    )
    trainer_class = dormouse.trl.share(PlainGRPO, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match="without .*llama_4_scaling_beta"):
        run(trainer_class, Ministral3ForCausalLM(config), tmp_path)


def sharded(trainer):
    fully_shard(trainer.model, mesh=init_device_mesh("cpu", (1,)))


def split(trainer):
    parallelize_module(
        trainer.model, init_device_mesh("cpu", (1,)), {"lm_head": ColwiseParallel()}
    )


def loaded_in_parts(trainer):
    trainer.is_distributed_loading_by_transformers = True


@pytest.mark.parametrize("take_apart", [sharded, split, loaded_in_parts])
def test_a_model_of_which_ranks_hold_parts_is_refused(take_apart, path, runtime, tmp_path):
    """As from_pretrained leaves it: Accelerate wraps none of these."""

    class Apart(PlainGRPO):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            take_apart(self)

    trainer_class = dormouse.trl.share(Apart, runtime=runtime)
    try:
        with pytest.raises(UnsupportedTrainerError, match="parts of the model.*loads whole"):
            made(trainer_class, plain_model(path), tmp_path)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_set", [False, True])
def test_a_reduction_in_each_microbatch_is_refused(is_set, path, runtime, tmp_path, monkeypatch):
    """On several processes."""

    class Two(PlainGRPO):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            monkeypatch.setattr(Accelerator, "num_processes", 2)

    kwargs = {"gradient_accumulation_kwargs": {"sync_each_batch": is_set}}
    expected = pytest.raises(UnsupportedTrainerError, match="without sync_each_batch")
    with expected if is_set else contextlib.nullcontext():
        trainer_class = dormouse.trl.share(Two, runtime=runtime)
        made(trainer_class, plain_model(path), tmp_path, accelerator_config=kwargs)
