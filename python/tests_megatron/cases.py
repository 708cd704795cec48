"""Small GPT models on one or two ranks, batches of rollouts, and Megatron's schedule over them.

Every case runs plainly, shared, and in FP64 plainly, which is the truth (docs/method.md §10).
"""

from __future__ import annotations

import dataclasses
import socket
from dataclasses import dataclass, field
from functools import partial

import conftest
import counted
import expert_counts
import on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import get_batch_on_this_cp_rank

import dormouse.megatron
from dormouse.megatron.refusals import unwrapped
from process_groups import destroy_groups
from rooms import room_of

VOCABULARY, LAYERS, COLUMNS_MAX = 48, 4, 64
# Of a case in FP64, and below: what rounding does in a call of ten rows differs by a third between
# two calls.
CALLS, CALLS_LOW = 2, 8
PROMPT_TOKENS, LONG_TOKENS = 21, 300
# Two chunks on each of four context-parallel ranks.
COLUMNS_UNIT = 8
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its layout over ranks, and how it is trained."""

    ranks: int = 1
    tensor_parallel: int = 1
    stages: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    chunks: int = 1
    """Parts of the model on a stage."""
    dtype: torch.dtype = torch.float64
    weights: torch.dtype = torch.float64
    """The dtype to which weights were rounded before they got the model's."""
    config: dict = field(default_factory=dict)
    """Of TransformerConfig."""
    model: dict = field(default_factory=dict)
    """Of GPTModel."""
    ddp: dict = field(default_factory=dict)
    """Of DistributedDataParallelConfig."""
    per_token: bool = False
    """The loss function returns the number of its tokens, too."""
    share: dict = field(default_factory=dict)
    """Of dormouse.megatron.share."""
    prompt_tokens: int = PROMPT_TOKENS
    """Of the longer prompt. Long ones sleep: pages leave whole."""
    ring: bool = False
    """Whether there is only room for K and V that pass round context-parallel ranks."""

    @property
    def is_balanced(self) -> bool:
        """Whether routers add losses or count tokens."""
        names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")
        return any(map(self.config.get, names))

    @property
    def columns(self) -> int:
        """Of the longest rows."""
        columns = COLUMNS_MAX - PROMPT_TOKENS + self.prompt_tokens
        return -(-columns // COLUMNS_UNIT) * COLUMNS_UNIT

    def of_dtype(self, dtype: torch.dtype) -> Case:
        return dataclasses.replace(self, dtype=dtype, weights=dtype)

    @property
    def alone(self) -> Case:
        """The same model where each rank has whole rows: what Megatron itself runs."""
        return dataclasses.replace(self, context_parallel=1)

    def truth_of(self, dtype: torch.dtype) -> Case:
        """The same model as :meth:`of_dtype`, in FP64."""
        return dataclasses.replace(self, weights=dtype)


PLAIN_GELU = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
    "num_query_groups": 4,
}
# Of Megatron's own schedule: three microbatches are a turn, and two stages, each of which is before
# and behind the other, cannot send both ways at once.
INTERLEAVED = {
    "microbatch_group_size_per_vp_stage": 3,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
BALANCED = EXPERTS | {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    # As large as other losses.
    "moe_aux_loss_coeff": [0.3, 0.5, 0.7],
    "moe_z_loss_coeff": 0.2,
}
CASES = {
    "one rank": Case(),
    "twice": Case(share={"graphs": "twice", "microbatch_tokens": 9}),
    "awake": Case(share={"sleep": False, "graphs": "kept"}),
    "learned positions, biases": Case(
        config=PLAIN_GELU, model={"position_embedding_type": "learned_absolute"}
    ),
    "interleaved rotary of half a head": Case(
        config={"rotary_interleaved": True}, model={"rotary_percent": 0.5, "rope_scaling": True}
    ),
    "tied, scaled by layer, norms of q and k": Case(
        config={"apply_query_key_layer_scaling": True, "qk_layernorm": True},
        model={"share_embeddings_and_output_weights": True},
    ),
    "per token": Case(config={"calculate_per_token_loss": True}, per_token=True),
    "experts": Case(config=EXPERTS),
    "experts, twice": Case(config=EXPERTS, share={"graphs": "twice", "microbatch_tokens": 9}),
    "experts, shared and gated ones, gathered, awake": Case(
        config=EXPERTS
        | {
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_shared_expert_gate": True,
            "moe_shared_expert_intermediate_size": 16,
            "moe_token_dispatcher_type": "allgather",
        },
        share={"sleep": False, "graphs": "kept"},
    ),
    "experts, long prompts": Case(config=EXPERTS, prompt_tokens=LONG_TOKENS),
    "experts, balanced, long prompts": Case(config=BALANCED, prompt_tokens=LONG_TOKENS),
    "experts, balanced, per token, twice": Case(
        config=BALANCED | {"calculate_per_token_loss": True},
        per_token=True,
        share={"graphs": "twice", "microbatch_tokens": 9},
    ),
    "experts, balanced by biases, awake": Case(
        config=EXPERTS
        | {
            "moe_layer_freq": [1, 0, 1, 0],
            "moe_router_bias_update_rate": 0.05,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
        share={"sleep": False, "graphs": "kept"},
    ),
    "two parts": Case(2, 2),
    "two parts, twice": Case(2, 2, share={"graphs": "twice", "microbatch_tokens": 9}),
    "two parts, tied, biases": Case(
        2, 2, config=PLAIN_GELU, model={"share_embeddings_and_output_weights": True}
    ),
    "two parts of one key head": Case(2, 2, config={"num_query_groups": 1}),
    "two parts of a sequence": Case(2, 2, config={"sequence_parallel": True}),
    "two parts of a sequence, experts": Case(2, 2, config=EXPERTS | {"sequence_parallel": True}),
    "two parts of a sequence, experts, balanced": Case(
        2, 2, config=BALANCED | {"sequence_parallel": True}
    ),
    "two stages": Case(2, stages=2, share={"microbatch_tokens": 9}),
    "two stages, tied, learned positions, biases": Case(
        2,
        stages=2,
        config=PLAIN_GELU,
        model={
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
        },
    ),
    "two stages, per token, awake": Case(
        2,
        stages=2,
        config={"calculate_per_token_loss": True},
        per_token=True,
        share={"sleep": False, "microbatch_tokens": 9},
    ),
    "two stages, experts": Case(2, stages=2, config=EXPERTS, share={"microbatch_tokens": 9}),
    "two stages of two chunks, experts": Case(
        2, stages=2, chunks=2, config=EXPERTS | INTERLEAVED, share={"microbatch_tokens": 9}
    ),
    "two stages of two chunks": Case(
        2, stages=2, chunks=2, config=INTERLEAVED, share={"microbatch_tokens": 9}
    ),
    "two stages of two chunks, tied, per token, awake": Case(
        2,
        stages=2,
        chunks=2,
        config=INTERLEAVED | {"calculate_per_token_loss": True},
        model={"share_embeddings_and_output_weights": True},
        per_token=True,
        share={"sleep": False},
    ),
    "two stages of two chunks of two replicas": Case(
        4,
        stages=2,
        chunks=2,
        config=INTERLEAVED,
        ddp={"overlap_grad_reduce": True},
        share={"microbatch_tokens": 9},
    ),
    "four stages": Case(4, stages=4, share={"microbatch_tokens": 9}),
    "two stages of two parts": Case(4, 2, 2, share={"microbatch_tokens": 9}),
    "two stages of two replicas": Case(4, stages=2),
    "two stages, prompts in chunks": Case(
        2, stages=2, share={"microbatch_tokens": 9, "prompt_chunks": 3}
    ),
    "two stages, long prompts in chunks, experts": Case(
        2,
        stages=2,
        config=EXPERTS,
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9, "prompt_chunks": 2},
    ),
    "two stages, long prompts": Case(
        2,
        stages=2,
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9, "prompt_chunks": 1},
    ),
    "two stages of two chunks, prompts in chunks, learned positions": Case(
        2,
        stages=2,
        chunks=2,
        config=PLAIN_GELU | INTERLEAVED,
        model={"position_embedding_type": "learned_absolute"},
        share={"microbatch_tokens": 9, "prompt_chunks": 4},
    ),
    "four stages, prompts in chunks": Case(
        4, stages=4, share={"microbatch_tokens": 9, "prompt_chunks": 4}
    ),
    "two stages of two parts of a sequence": Case(
        4, 2, 2, config={"sequence_parallel": True}, share={"microbatch_tokens": 9}
    ),
    "two stages of two parts of a sequence, prompts in chunks": Case(
        4,
        2,
        2,
        config={"sequence_parallel": True, "calculate_per_token_loss": True},
        per_token=True,
        share={"microbatch_tokens": 9, "prompt_chunks": 3},
    ),
    "two stages, context on two ranks, long prompts": Case(
        4,
        stages=2,
        context_parallel=2,
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9},
    ),
    "two stages of two chunks, context on two ranks": Case(
        4,
        stages=2,
        chunks=2,
        context_parallel=2,
        config=INTERLEAVED,
        share={"microbatch_tokens": 9},
    ),
    "two stages, context and experts on two ranks, per token": Case(
        4,
        stages=2,
        expert_parallel=2,
        context_parallel=2,
        config=EXPERTS | {"calculate_per_token_loss": True},
        per_token=True,
        share={"microbatch_tokens": 9},
    ),
    "two stages, experts on two ranks": Case(
        4, stages=2, expert_parallel=2, config=EXPERTS, share={"microbatch_tokens": 9}
    ),
    "two stages of two chunks, experts on two ranks, overlapped": Case(
        4,
        stages=2,
        chunks=2,
        expert_parallel=2,
        config=EXPERTS | INTERLEAVED | {"calculate_per_token_loss": True},
        ddp={"overlap_grad_reduce": True},
        per_token=True,
        share={"microbatch_tokens": 9, "sleep": False},
    ),
    "two stages of two parts of a sequence, experts on two ranks": Case(
        4,
        2,
        2,
        expert_parallel=2,
        config=EXPERTS | {"sequence_parallel": True, "expert_tensor_parallel_size": 1},
        share={"microbatch_tokens": 9},
    ),
    "two stages, experts on two ranks, long prompts": Case(
        4,
        stages=2,
        expert_parallel=2,
        config=EXPERTS,
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9},
    ),
    "two stages of two chunks of two parts of a sequence, experts": Case(
        4,
        2,
        2,
        chunks=2,
        config=EXPERTS | INTERLEAVED | {"sequence_parallel": True},
        share={"microbatch_tokens": 9, "prompt_chunks": 2},
    ),
    "experts on two ranks": Case(2, expert_parallel=2, config=EXPERTS),
    "experts on two ranks, two parts of a sequence": Case(
        2,
        2,
        expert_parallel=2,
        config=EXPERTS | {"sequence_parallel": True, "expert_tensor_parallel_size": 1},
    ),
    "experts on two ranks, long prompts": Case(
        2, expert_parallel=2, config=EXPERTS, prompt_tokens=LONG_TOKENS
    ),
    "experts on two ranks, balanced": Case(2, expert_parallel=2, config=BALANCED),
    "experts of two replicas, balanced over both": Case(2, config=BALANCED),
    "experts on two ranks, two replicas, balanced": Case(
        4, expert_parallel=2, config=BALANCED, share={"microbatch_tokens": 9}
    ),
    "experts on two ranks, two replicas, long prompts": Case(
        4,
        expert_parallel=2,
        config=EXPERTS,
        share={"microbatch_tokens": 9},
        prompt_tokens=LONG_TOKENS,
    ),
    "experts on four ranks, two parts of a sequence": Case(
        4,
        2,
        expert_parallel=4,
        config=EXPERTS | {"sequence_parallel": True, "expert_tensor_parallel_size": 1},
        share={"microbatch_tokens": 9},
    ),
    "experts on two ranks, overlapped": Case(
        2,
        expert_parallel=2,
        config=EXPERTS | {"calculate_per_token_loss": True},
        ddp={"overlap_grad_reduce": True, "bucket_size": 1000},
        per_token=True,
        share={"microbatch_tokens": 9, "sleep": False},
    ),
    "context on two ranks": Case(2, context_parallel=2),
    "context on two ranks, twice": Case(
        2, context_parallel=2, share={"graphs": "twice", "microbatch_tokens": 9}
    ),
    "context on two ranks, per token, awake": Case(
        2,
        context_parallel=2,
        config={"calculate_per_token_loss": True},
        per_token=True,
        share={"sleep": False, "graphs": "kept"},
    ),
    "context on two ranks, tied, learned positions, biases": Case(
        2,
        context_parallel=2,
        config=PLAIN_GELU,
        model={
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
        },
    ),
    "context on two ranks, long prompts": Case(
        2, context_parallel=2, prompt_tokens=LONG_TOKENS
    ),
    "context on two ranks, two parts": Case(4, 2, context_parallel=2),
    "context on two ranks, two parts of a sequence": Case(
        4, 2, context_parallel=2, config={"sequence_parallel": True}
    ),
    "context on two ranks, two replicas, overlapped": Case(
        4,
        context_parallel=2,
        ddp={"overlap_grad_reduce": True, "bucket_size": 1000},
        share={"microbatch_tokens": 9},
        prompt_tokens=LONG_TOKENS,
    ),
    "context on four ranks": Case(4, context_parallel=4),
    "context on two ranks, ring": Case(
        2, context_parallel=2, share={"microbatch_tokens": 9}, ring=True
    ),
    "context on two ranks, ring, long prompts": Case(
        2,
        context_parallel=2,
        config={"calculate_per_token_loss": True, "num_query_groups": 4},
        per_token=True,
        prompt_tokens=LONG_TOKENS,
        ring=True,
    ),
    "context on two ranks, ring, two parts of a sequence": Case(
        4, 2, context_parallel=2, config={"sequence_parallel": True}, ring=True
    ),
    "context on four ranks, ring": Case(
        4, context_parallel=4, share={"microbatch_tokens": 9}, ring=True
    ),
    "context on two ranks, ring, experts on four": Case(
        4,
        expert_parallel=4,
        context_parallel=2,
        config=EXPERTS,
        share={"microbatch_tokens": 9},
        ring=True,
    ),
    "context on two ranks, experts": Case(2, context_parallel=2, config=EXPERTS),
    "context on two ranks, experts on both": Case(
        2,
        expert_parallel=2,
        context_parallel=2,
        config=EXPERTS,
        share={"microbatch_tokens": 9},
        prompt_tokens=LONG_TOKENS,
    ),
    "context on two ranks, experts on four": Case(
        4, expert_parallel=4, context_parallel=2, config=EXPERTS, share={"microbatch_tokens": 9}
    ),
    "two replicas": Case(2, 1),
    "two replicas, sharded optimizer": Case(2, 1, ddp={"use_distributed_optimizer": True}),
    "two replicas, overlapped": Case(2, 1, ddp={"overlap_grad_reduce": True, "bucket_size": 1000}),
}


class ExactGPT(GPTModel):
    """Computes losses in its own dtype; Megatron's cross entropy does so in FP32."""

    def compute_language_model_loss(self, labels, logits):
        logits = gather_from_tensor_model_parallel_region(logits, group=self.pg_collection.tp)
        logits = logits.permute(1, 2, 0)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def exact_softmax(rows, dim, dtype=None, own=torch.softmax):
    """Softmax of FP64 rows stays in FP64; that of Megatron's routers is FP32."""
    return own(rows, dim, dtype=None if rows.dtype is torch.float64 else dtype)


def exact_float(tensor, own=torch.Tensor.float):
    """FP64 stays FP64: Megatron's routers take a sigmoid in FP32."""
    return tensor if tensor.dtype is torch.float64 else own(tensor)


# Not a mode of torch's: passes in a backward see none.
torch.softmax, torch.Tensor.float = exact_softmax, exact_float


class ByToken:
    """In place of Megatron's replay of routing: a router selects by token and position.

    In BF16 rounding sends many a row to other experts, in any two runs (docs/method.md §10).
    """

    tokens = positions = torch.empty(0)
    """Of the rows of the model's last forward."""

    def __init__(self, layer: int):
        self._layer = layer

    def get_replay_topk(self, scores, topk, *own):
        rows, experts = scores.shape
        # Sequence parallelism: each rank has a part.
        part = slice(None)
        if rows != self.tokens.numel():
            part = slice(parallel_state.get_tensor_model_parallel_rank() * rows, None)
        keys = (self.tokens * 7 + self.positions * 13 + self._layer * 5)[part][:rows, None]
        # Different ones, for as many experts as there are, less one.
        indices = (keys + torch.arange(topk) * (1 + keys % (experts - 1))) % experts
        return scores.gather(1, indices), indices


class RecordedGPT(GPTModel):
    """Its routers select by token and position."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        for module in self.modules():
            if isinstance(module, TopKRouter):
                module.router_replay = ByToken(module.layer_number)

    def forward(self, input_ids, position_ids, *args, **named):
        # Megatron's rows are those of the first column, then those of the second.
        ByToken.tokens, ByToken.positions = (x.T.reshape(-1) for x in (input_ids, position_ids))
        return super().forward(input_ids, position_ids, *args, **named)


class ExactRecordedGPT(RecordedGPT, ExactGPT):
    """Both."""


class PartialNorm(torch.nn.RMSNorm):
    """Of a part of the sequence: Megatron's norm for this needs Transformer Engine or Apex."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def chunks_of(case: Case) -> list[torch.nn.Module]:
    """Returns this stage's parts of the model, each in Megatron's DistributedDataParallel."""
    config = config_of(case)
    chunks = [_chunk_of(case, config, number) for number in range(case.chunks)]
    no_sync = [each.no_sync for each in chunks]
    config.no_sync_func = no_sync if case.chunks > 1 else no_sync[0]
    config.finalize_model_grads_func = expert_counts.finalize
    return chunks


def model_of(case: Case) -> torch.nn.Module:
    """Returns the one part of :func:`chunks_of`."""
    (chunk,) = chunks_of(case)
    return chunk


def config_of(case: Case) -> TransformerConfig:
    settings = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "init_method_std": 0.15,
        "tensor_model_parallel_size": case.tensor_parallel,
        "expert_model_parallel_size": case.expert_parallel,
        "context_parallel_size": case.context_parallel,
        "pipeline_model_parallel_size": case.stages,
        "virtual_pipeline_model_parallel_size": case.chunks if case.chunks > 1 else None,
        "pipeline_dtype": torch.float64,
        "params_dtype": torch.float64,
        "bf16": case.dtype is torch.bfloat16,
    }
    config = TransformerConfig(**(settings | case.config))
    # Its construction refuses it without experts.
    config.variable_seq_lengths = case.stages > 1 and case.chunks == 1
    return config


def _chunk_of(case: Case, config: TransformerConfig, number: int) -> torch.nn.Module:
    """Returns a part of the model; equal weights for equal layouts."""
    config.params_dtype = config.pipeline_dtype = torch.float64
    chunk = {"ignore_virtual": False, "vp_stage": number if case.chunks > 1 else None}
    torch.manual_seed(7 + number)
    model_parallel_cuda_manual_seed(7)
    kind = ExactGPT if case.dtype is torch.float64 else GPTModel
    if case.weights is torch.bfloat16 and config.num_moe_experts is not None:
        kind = ExactRecordedGPT if kind is ExactGPT else RecordedGPT
    model = kind(
        config,
        spec_of(config, chunk["vp_stage"]),
        vocab_size=VOCABULARY,
        max_sequence_length=case.columns,
        pre_process=parallel_state.is_pipeline_first_stage(**chunk),
        post_process=parallel_state.is_pipeline_last_stage(**chunk),
        vp_stage=chunk["vp_stage"],
        **({"position_embedding_type": "rope"} | case.model),
    )
    config.params_dtype = config.pipeline_dtype = case.dtype
    model = model.to(case.weights).to(case.dtype)
    model = Float16Module(config, model) if config.bf16 else model
    return DistributedDataParallel(config, DistributedDataParallelConfig(**case.ddp), model)


def spec_of(config: TransformerConfig, vp_stage: int | None = None):
    if config.num_moe_experts is None and not config.sequence_parallel:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
        _set_core_attention(config, spec)
        return spec
    spec = get_gpt_decoder_block_spec(
        config, False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        _set_core_attention(config, layer)
    if config.sequence_parallel:
        spec.layer_norm = PartialNorm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = PartialNorm
            layer.submodules.pre_mlp_layernorm = PartialNorm
    return spec


def core_attention_of(config: TransformerConfig) -> type:
    is_split = config.context_parallel_size > 1
    return dormouse.megatron.ContextAttention if is_split else DotProductAttention


def _set_core_attention(config: TransformerConfig, layer: ModuleSpec) -> None:
    layer.submodules.self_attention.submodules.core_attention = core_attention_of(config)


def batches_of(
    call: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    columns: int = COLUMNS_MAX,
    replica: int | None = None,
) -> list[dict]:
    """Returns the microbatches of this rank, or what it has of those of a replica: rows of two
    prompts in any order, one of which has a response of a single token, one holes in its loss and
    one no loss, with padding behind."""
    rank = parallel_state.get_data_parallel_rank() if replica is None else replica
    is_interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    generator = torch.Generator().manual_seed(10 * call + rank)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (count,), generator=generator)

    prompts = draw(prompt_tokens), draw(prompt_tokens - 8)
    # Replicas differ in what fits into a microbatch of 9 tokens.
    rows = [(0, 9 - 4 * (rank % 2)), (1, 5), (0, 1), (0, 14), (1, 0), (1, 11)]
    found = []
    for place in range(0, len(rows), 2):
        own = []
        for prompt, response in rows[place : place + 2]:
            ids = torch.cat([prompts[prompt], draw(response)])
            end = len(ids) - 1
            # Megatron's interleaved schedule sends shapes the wrong way between two stages.
            mask = torch.zeros(columns - (0 if is_interleaved else COLUMNS_UNIT * place // 2))
            mask[end - response : end] = 1
            if response == 14:
                mask[end - 9 : end - 6] = 0
            room = len(mask) + 1 - len(ids)
            own.append((torch.nn.functional.pad(ids, (0, room)), mask))
        ids, masks = map(torch.stack, zip(*own, strict=True))
        found.append(
            {
                "tokens": ids[:, :-1],
                "labels": ids[:, 1:],
                "loss_mask": masks,
                "positions": torch.arange(masks.shape[1]).expand_as(masks),
                "weights": torch.randn(len(own), 1, generator=generator),
                "count": masks.sum(),
            }
        )
    return list(map(part_of, found))


PARTS = ("tokens", "labels", "loss_mask", "positions")


def part_of(batch: dict) -> dict:
    """Returns what this rank has of a batch, as Megatron cuts it."""
    return batch | get_batch_on_this_cp_rank({name: batch[name] for name in PARTS})


def loss_func(case: Case, batch: dict, losses: torch.Tensor):
    mask = batch["loss_mask"]
    total = (losses * mask * batch["weights"]).sum()
    if case.per_token:
        count = mask.sum().int()
        return total, count, {"loss": (total.detach(), count)}
    loss = total / batch["count"]
    # Megatron multiplies the loss in place by the number of context-parallel ranks.
    return loss, {"loss": loss.detach().clone()}


def forward_step(case: Case, data_iterator, model):
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return losses, partial(loss_func, case, batch)


def arguments_of(case: Case, chunks: list, batches: list[dict]) -> dict:
    """Returns the arguments of a schedule."""
    return {
        "forward_step_func": partial(forward_step, case),
        "data_iterator": [iter(batches) for _ in chunks],
        "model": chunks,
        "num_microbatches": len(batches),
        "seq_length": case.columns,
        "micro_batch_size": 2,
    }


def run(case: Case, function, ddp, batches: list[dict], **named) -> list:
    """Runs a schedule once, from zero gradients; returns what the loss function returned.
    ``ddp``: a model, or its parts. ``named``: other arguments of the schedule, or other values."""
    chunks = ddp if isinstance(ddp, list) else [ddp]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    return function(**arguments_of(case, chunks, batches) | named)


def gradients(ddp) -> Tensors:
    """Returns copies of this rank's gradients, as an optimizer would find them."""
    return {
        f"{number}.{name}": parameter.main_grad.clone()
        for number, chunk in enumerate(ddp if isinstance(ddp, list) else [ddp])
        for name, parameter in unwrapped(chunk).named_parameters()
    }


def calls_of(dtype: torch.dtype) -> int:
    """Returns the number of calls of a case with weights of this dtype."""
    return CALLS if dtype is torch.float64 else CALLS_LOW


def trained(case: Case, runtime: dormouse.Runtime | None, copies: int = 1) -> dict:
    """Returns gradients and what was logged, of each call. ``runtime``: with shared prompts.
    ``copies``: so many replicas have the same rows."""
    replica = parallel_state.get_data_parallel_rank() // copies
    ddp, function = chunks_of(case), get_forward_backward_func()
    bytes_sent: list[tuple[int, int]] = []
    asleep: list[int] = []
    held: list[tuple[int, int]] = []
    gpt = unwrapped(ddp[0])
    if runtime is not None:
        function = dormouse.megatron.share(function, runtime=runtime, **case.share)
    found = {"gradients": [], "losses": [], "balance": []}
    moe_utils.clear_aux_losses_tracker()
    for call in range(calls_of(case.weights)):
        batches = batches_of(call, case.prompt_tokens, case.columns, replica)
        room = room_of(gpt, case.prompt_tokens, is_ring=case.ring)
        with counted.of_call(gpt, bytes_sent, asleep, held), room:
            found["losses"].append(run(case, function, ddp, batches))
        found["gradients"].append(gradients(ddp))
        found["balance"].append(expert_counts.balance(ddp))
    if runtime is not None:
        found["sharing"] = function.sharing
        found["bytes"], found["asleep"], found["held"] = bytes_sent, asleep, held
        found["open"] = runtime.stats()["asleep"]["current_bytes"]
    return found


def join(case: Case = Case()) -> None:
    """Joins the ranks of the environment, or makes a group of one."""
    if not dist.is_initialized():
        alone = {}
        if not dist.is_torchelastic_launched() and "RANK" not in conftest.os.environ:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            alone = {"rank": 0, "world_size": 1, "init_method": f"tcp://localhost:{port}"}
        dist.init_process_group("gloo", **alone)
    destroy_groups()
    parallel_state.initialize_model_parallel(
        case.tensor_parallel,
        case.stages,
        case.chunks if case.chunks > 1 else None,
        context_parallel_size=case.context_parallel,
        expert_model_parallel_size=case.expert_parallel,
        expert_tensor_parallel_size=case.config.get("expert_tensor_parallel_size"),
    )
