"""Whether values depend on the columns of padding before a row, in every precision."""

from __future__ import annotations

import pytest
import torch
from model_zoo import zoo_model
from models import tiny
from test_check_low import FLASH, flash
from transformers import GPT2Config, GPT2LMHeadModel

from dormouse.hf import support
from dormouse.trl.positions import check_positions
from dormouse.trl.refusals import UnsupportedTrainerError

CPU = torch.device("cpu")


def check(model: torch.nn.Module) -> None:
    check_positions(model, support.resolve(model), CPU)


def learned_positions() -> torch.nn.Module:
    sizes = {"vocab_size": 64, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_learned_positions_are_refused(dtype):
    with pytest.raises(UnsupportedTrainerError, match="numbers the columns"):
        check(learned_positions().to(dtype))


def test_fp32_weights_with_kernels_that_take_no_fp32(flash):
    """As trainers run them: under autocast the kernel gets BF16."""
    model = tiny(dtype=torch.float32)
    model.config._attn_implementation = FLASH
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(model)
    assert flash == []


def test_products_of_fewer_bits_are_no_dependence():
    model = tiny(dtype=torch.float32)

    class Rounded(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.nn.functional.linear:
                # By as much as products of TF32 differ, amplified by many layers.
                out = out * (1 + 0.1 * torch.rand_like(out))
            return out

    before = torch.backends.mkldnn.matmul.fp32_precision
    with Rounded(), pytest.raises(UnsupportedTrainerError):
        check(model)
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    try:
        with Rounded():
            check(model)
        with Rounded(), pytest.raises(UnsupportedTrainerError):
            check(learned_positions())
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_what_is_no_number_is_refused():
    model = tiny(dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(UnsupportedTrainerError, match="numbers the columns"):
        check(model)


KINDS = ("llama", "gemma2", "gemma3n_text", "qwen3_next", "bloom", "mamba")


@pytest.mark.parametrize("kind", KINDS)
def test_positions_that_count_no_columns_pass(kind):
    check(zoo_model(kind, torch.float32))
