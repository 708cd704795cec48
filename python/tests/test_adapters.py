"""Adapters of peft: each step is exact, or refused by name."""

from __future__ import annotations

import contextlib

import peft
import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import distance, group, loss_fn, take_gradients, tiny
from test_altered_models import dense_backward

from dormouse.hf import SharedPrefix, UnsupportedModelError, check, support

pytestmark = pytest.mark.filterwarnings("ignore")

FP64_BOUND = 1e-10
LAYERS = 2
MICROBATCH_TOKENS = 8
INVOCATION = [3, 5]

MODULES = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"],
    "task_type": "CAUSAL_LM",
}
ATTENTION = MODULES | {"target_modules": ["q_proj", "k_proj", "v_proj"]}
HEADS = MODULES | {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
VIRTUAL = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}


def lora(**changes):
    return peft.LoraConfig(**({"r": 4} | MODULES | changes))


EXACT = {
    "LoRA": lora(),
    "LoRA of every linear layer": lora(target_modules="all-linear"),
    "LoRA of embeddings and head": lora(**HEADS),
    "LoRA of one layer": lora(layers_to_transform=[1]),
    "LoRA of a parameter": lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "LoRA with biases": lora(lora_bias=True, bias="lora_only"),
    "LoRA and whole modules": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "LoRA and tokens": lora(trainable_token_indices=[3, 5, 7]),
    "rsLoRA": lora(use_rslora=True),
    "DoRA": lora(use_dora=True),
    "AdaLoRA": peft.AdaLoraConfig(init_r=4, total_step=10, tinit=1, tfinal=1, **MODULES),
    "VeRA": peft.VeraConfig(r=8, **ATTENTION | {"target_modules": ["q_proj", "down_proj"]}),
    "IA3": peft.IA3Config(feedforward_modules=["up_proj", "down_proj"], **MODULES),
    "OFT": peft.OFTConfig(oft_block_size=8, **MODULES),
    "LoHa": peft.LoHaConfig(r=4, **MODULES),
    "LoKr": peft.LoKrConfig(r=4, **MODULES),
    "HRA": peft.HRAConfig(r=4, **ATTENTION),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 2, 3], target_modules=["embed_tokens"]),
}

REFUSED = {
    "prompt tuning": (peft.PromptTuningConfig(**VIRTUAL), "PROMPT_TUNING.* puts virtual tokens"),
    "prefix tuning": (peft.PrefixTuningConfig(**VIRTUAL), "PREFIX_TUNING.* puts virtual tokens"),
    "p-tuning": (
        peft.PromptEncoderConfig(encoder_hidden_size=16, **VIRTUAL),
        "P_TUNING.* puts virtual tokens",
    ),
    "activated LoRA": (lora(alora_invocation_tokens=INVOCATION), "is an activated LoRA"),
    "dropout": (lora(lora_dropout=0.1), r"dropout 0\.1 in .*lora_dropout.*prompt_dropout=False"),
    "module dropout": (peft.LoHaConfig(r=4, module_dropout=0.01, **MODULES), "module_dropout 0.01"),
    "rank dropout": (peft.LoKrConfig(r=4, rank_dropout=0.01, **MODULES), "rank_dropout 0.01"),
}


def moved(model):
    """Moves adapters from their first values, which often have no effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise)
    return model


def adapted(config, base=None):
    base = tiny(num_hidden_layers=LAYERS) if base is None else base
    return moved(peft.get_peft_model(base, config).double().train())


def hold(model, shared, loss=loss_fn) -> None:
    case = group(21, (5, 1, 9))
    shared.backward(case, loss, microbatch_tokens=MICROBATCH_TOKENS)
    got = take_gradients(model)
    dense_backward(model, case, loss)
    wanted = take_gradients(model)
    assert wanted and distance(got, wanted) <= FP64_BOUND


@pytest.mark.parametrize("method", EXACT)
def test_exact(method, runtime):
    model = adapted(EXACT[method])
    hold(model, SharedPrefix(model, runtime))


@pytest.mark.parametrize("method", EXACT)
def test_short_lengths_suffice(method):
    """The code is that of torch, transformers and peft, so the check needs no long groups."""
    model = peft.get_peft_model(tiny(num_hidden_layers=LAYERS, dtype=torch.float32), EXACT[method])
    model.get_base_model().activation_checkpointing_enable()
    assert check.unknown_code(support.resolve(model)) is None


@pytest.mark.parametrize("method", REFUSED)
def test_refused(method, runtime):
    config, refusal = REFUSED[method]
    model = adapted(config)
    with pytest.raises(UnsupportedModelError, match=refusal):
        SharedPrefix(model, runtime).backward(group(), loss_fn)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant, runtime):
    base = tiny(num_hidden_layers=LAYERS)
    base.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model = adapted(lora(), base)
    hold(model, SharedPrefix(model, runtime))


def test_dropout_of_adapters_with_checkpointed_layers(runtime):
    """Given the masks that are drawn: those of another step with the same seed."""
    model, case, gradients = adapted(lora(lora_dropout=0.2)), group(), []
    shared = SharedPrefix(model, runtime, prompt_dropout=False)
    for switch in ("disable", "enable"):
        getattr(model, f"gradient_checkpointing_{switch}")()
        shared.backward(case, loss_fn)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        shared.backward(case, loss_fn)
        gradients.append(take_gradients(model))
    assert distance(*gradients) <= FP64_BOUND


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts(kind, runtime):
    config = lora(
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    with in_fp64():
        model = adapted(config, zoo_model(kind))
        hold(model, SharedPrefix(model, runtime))


def test_adapters_of_transformers(runtime):
    model = tiny(num_hidden_layers=LAYERS)
    model.add_adapter(lora())
    moved(model)
    hold(model, SharedPrefix(model, runtime))
    model.add_adapter(lora(alora_invocation_tokens=INVOCATION), "activated")
    model.set_adapter("activated")
    with pytest.raises(UnsupportedModelError, match="'activated' is an activated LoRA"):
        SharedPrefix(model, runtime).backward(group(), loss_fn)


def test_adapters_that_change_between_steps(runtime):
    model = adapted(lora())
    shared = SharedPrefix(model, runtime)
    hold(model, shared)
    model.add_adapter("other", lora(r=2))
    model.set_adapter("other")
    moved(model)
    hold(model, shared)
    assert all(p.grad is None for name, p in model.named_parameters() if ".default" in name)
    model.set_adapter("default")
    hold(model, shared)
    model.base_model.set_adapter(["default", "other"])
    hold(model, shared)
    with model.disable_adapter(), pytest.raises(UnsupportedModelError, match="require grad"):
        shared.backward(group(), loss_fn)
    hold(model, shared)
    model.merge_adapter()
    model.get_base_model().lm_head.weight.requires_grad_(True)
    hold(model, shared)
    model.unmerge_adapter()
    hold(model, shared)


def test_merged_weights(runtime):
    model = adapted(lora()).merge_and_unload().requires_grad_(True)
    hold(model, SharedPrefix(model, runtime))


def without_adapter(model):
    return model.disable_adapter()


@contextlib.contextmanager
def with_another(model):
    model.set_adapter("reference")
    try:
        yield
    finally:
        model.set_adapter("default")


@pytest.mark.parametrize("as_reference", [without_adapter, with_another])
def test_a_reference_in_the_loss(as_reference, runtime):
    """Adapters that are switched and switched back are the same model."""
    model = adapted(lora())
    model.add_adapter("reference", lora())
    shared = SharedPrefix(model, runtime)

    def loss(logits, labels, i):
        with torch.no_grad(), as_reference(model):
            reference = model(input_ids=labels.unsqueeze(0), use_cache=False).logits[0]
        return loss_fn(logits, labels, i) + ((logits - reference) ** 2).mean()

    hold(model, shared, loss)
    first = shared.backward(group(), loss).checked
    assert shared.backward(group(), loss).checked is first
