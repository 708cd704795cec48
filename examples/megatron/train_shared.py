"""Policy gradients with Megatron-core: a small language model learns to prefer even tokens.

The section "Megatron-core" of docs/trainers.md has the command that starts it.
"""

from functools import partial

import on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import dormouse.megatron

VOCABULARY, PROMPT, RESPONSE, ROWS, MICROBATCHES, UPDATES = 64, 96, 16, 4, 2, 5
COLUMNS = PROMPT + RESPONSE - 1


def build():
    """Returns the model in Megatron's DistributedDataParallel, and its optimizer."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=COLUMNS,
        position_embedding_type="rope",
    )
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=1.0), [ddp])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp.no_sync
    config.grad_scale_func = optimizer.scale_loss
    return ddp, optimizer


def batches(update):
    """Yields the microbatches of an update: responses to one prompt, and their advantages."""
    generator = torch.Generator().manual_seed(update)
    prompt = torch.randint(VOCABULARY, (PROMPT,), generator=generator)
    for _ in range(MICROBATCHES):
        responses = torch.randint(VOCABULARY, (ROWS, RESPONSE), generator=generator)
        rewards = (responses % 2 == 0).float().mean(1)
        ids = torch.cat([prompt.repeat(ROWS, 1), responses], 1)
        yield {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "loss_mask": (torch.arange(COLUMNS) >= PROMPT - 1).float().repeat(ROWS, 1),
            "position_ids": torch.arange(COLUMNS).repeat(ROWS, 1),
            "advantages": (rewards - 0.5)[:, None],
        }


def loss_func(batch, losses):
    mask = batch["loss_mask"]
    loss = (losses * mask * batch["advantages"]).sum() / mask.sum()
    return loss, {"loss": loss.detach()}


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_func, batch)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    model_parallel_cuda_manual_seed(0)
    model, optimizer = build()
    forward_backward_func = dormouse.megatron.share(get_forward_backward_func())
    for update in range(UPDATES):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=batches(update),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=COLUMNS,
            micro_batch_size=ROWS,
        )
        _, norm, _ = optimizer.step()
        loss = sum(float(each["loss"]) for each in reduced) / MICROBATCHES
        print(f"rank {dist.get_rank()}: update {update}: {loss=:.5f}, {norm=:.5f}")
    dist.destroy_process_group()
