"""The check where weights are not widened, or where the model's kernels accept no FP32."""

from __future__ import annotations

import inspect

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import group, loss_fn, tiny
from transformers import AttentionInterface, MixtralConfig, MixtralForCausalLM, PretrainedConfig
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import dormouse
from dormouse import host_memory
from dormouse.hf import SharedPrefix, UnsupportedModelError, Way, check, mixers
from dormouse.hf.media import check as check_media

FLASH = "flash_attention_2"


def bf16(**changes):
    return tiny(dtype=torch.bfloat16, num_hidden_layers=2, **changes)


@pytest.fixture
def nothing_is_widened(monkeypatch):
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 0)


def checked(model, runtime):
    return SharedPrefix(model, runtime).backward(group(), loss_fn).checked


@pytest.fixture
def flash(monkeypatch):
    """Calls of an attention that accepts what flash attention does, by dtype."""
    dtypes = []

    def attention(module, query, key, value, mask, scaling=None, **others):
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        dtypes.append(query.dtype)
        count = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(count, 1) for each in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling
        )
        return out.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, FLASH, attention)
    return dtypes


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_flash_attention_takes_no_fp32(flash, runtime, is_checkpointed):
    model = bf16()
    model.config._attn_implementation = FLASH
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    found = checked(model, runtime)
    assert found.dtype is torch.float32 and found.error < found.tolerance
    # Its own dtype is compared by its own kernel, and it keeps it.
    assert set(flash) == {torch.bfloat16}
    assert model.config._attn_implementation == FLASH


def test_a_delta_rule_that_takes_no_fp32(runtime, monkeypatch):
    name = "torch_chunk_gated_delta_rule"
    own, dtypes = getattr(qwen3_next, name), set()

    def kernel(query, *args, **kwargs):
        assert query.dtype is torch.bfloat16, "FLA: accepted: anything but FP32"
        dtypes.add(query.dtype)
        return own(query, *args, **kwargs)

    kernel.__wrapped__ = inspect.unwrap(own)
    kernel.__name__ = name
    monkeypatch.setattr(qwen3_next, name, kernel)
    found = checked(zoo_model("qwen3_next").to(torch.bfloat16), runtime)
    assert found.dtype is torch.float32 and found.error < found.tolerance
    assert dtypes == {torch.bfloat16}


class WithoutLastGradient(torch.autograd.Function):
    """A scan whose last state has no gradient, as that of mamba_ssm."""

    @staticmethod
    def forward(ctx, out, end):
        return out.clone(), end.clone()

    @staticmethod
    def backward(ctx, grad, ignored):
        return grad, None


def test_a_scan_whose_last_state_has_no_gradient(runtime, monkeypatch):
    own = jamba.mamba_selective_scan

    def mamba_selective_scan(*args, **kwargs):
        found = own(*args, **kwargs)
        return WithoutLastGradient.apply(*found) if isinstance(found, tuple) else found

    monkeypatch.setattr(jamba, "mamba_selective_scan", mamba_selective_scan)
    with in_fp64():
        found = checked(zoo_model("jamba"), runtime)
    assert found.error <= 1e-10


def mixtral(**changes):
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=97,
        **changes,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16).train()


def test_jitter_of_routers_is_refused_by_name(runtime):
    model = mixtral(router_jitter_noise=0.01)
    with pytest.raises(UnsupportedModelError, match="jitter_noise 0.01 in"):
        checked(model, runtime)
    assert checked(model.eval(), runtime)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_noise_without_a_name(nothing_is_widened, runtime, noise):
    """It is below the tolerance. Numbers that are drawn and change nothing are no noise."""
    model = bf16()
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out * (1 + noise * torch.rand_like(out))
    )
    if noise:
        with pytest.raises(UnsupportedModelError, match="with other random numbers, and by"):
            checked(model, runtime)
    else:
        assert checked(model, runtime).tolerance == check.TOLERANCE_LOW


def test_rounding_is_that_of_the_dtype():
    model = bf16()
    ids = torch.arange(12)[None]
    plain = model(ids).logits
    with check._rounding(SharedPrefixView(model)):
        off = model(ids).logits
    distance = float((off - plain).float().norm() / plain.float().norm())
    assert 1e-4 < distance < 0.1


class SharedPrefixView:
    """What the context of rounding needs of a model."""

    def __init__(self, model):
        self.layers, self.embedding = model.model.layers, model.get_input_embeddings()


def amplifying():
    """A model in FP32 that turns rounding into differences of some per cent."""
    model = tiny(dtype=torch.float32, num_hidden_layers=2)
    model.model.layers[0].register_forward_hook(
        lambda module, args, out: out + (0.15 * out * torch.sin(3e8 * out)).detach()
    )
    return model


@pytest.mark.parametrize("is_dropped", [False, True])
def test_amplified_rounding_hides_no_lost_gradient(
    nothing_is_widened, runtime, monkeypatch, is_dropped
):
    real = dormouse.Prefix.accumulate

    def accumulate(self, layer, slot, grad):
        if not is_dropped or layer != 1:
            real(self, layer, slot, grad)

    monkeypatch.setattr(dormouse.Prefix, "accumulate", accumulate)
    # One response at a time needs less of what is lost.
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.PARTS])
    with torch.autocast("cpu", torch.bfloat16):
        if is_dropped:
            with pytest.raises(UnsupportedModelError, match="is not exact"):
                checked(amplifying(), runtime)
        else:
            assert checked(amplifying(), runtime).tolerance == check.TOLERANCE_LOW


@pytest.mark.parametrize("inner", ["vision_config", "audio_config"])
def test_tokens_that_an_inner_configuration_names(inner, runtime):
    model = tiny()
    setattr(model.config, inner, PretrainedConfig(image_token_id=95))
    shared = SharedPrefix(model, runtime)
    with pytest.raises(UnsupportedModelError, match="token 95 at position 2, the image_token_id"):
        shared.score(dormouse.Group([3, 4, 95, 6], [[7, 8]], [1.0]))


def test_a_model_without_configuration_has_no_such_tokens():
    check_media(torch.nn.Linear(2, 2), [])
