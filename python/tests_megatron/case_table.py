"""The cases of test_gradients.py: models, their layouts over ranks, and options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch

VOCABULARY, LAYERS, HIDDEN, COLUMNS_MAX = 48, 4, 32, 64
# Of a case in FP64, and in others: what rounding does in a call of ten rows differs by a third
# between two calls. Where experts of ranks differ, one row may have most of a call's gradient, and
# its rounding errors most of those of eight calls in BF16.
CALLS = 2
CALLS_OF = {torch.float64: CALLS, torch.float32: 4, torch.bfloat16: 8}
CALLS_OF_EXPERTS = 32
PROMPT_TOKENS, LONG_TOKENS = 21, 300
# Of layers whose tensors of short prompts sleep, also of a half of the rows or of the layer.
WIDE = 1024
# Two chunks on each of four context-parallel ranks.
COLUMNS_UNIT = 8


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
    has_third: bool = False
    """Whether every second replica has a third prompt."""
    microbatch_rows: int = 2
    """Of the trainer's microbatches."""
    own_configs: bool = False
    """Whether each part of the model has a configuration of its own. The functions of the schedule
    are in the first part's alone, as Megatron-LM sets them."""

    @property
    def is_balanced(self) -> bool:
        """Whether routers add losses or count tokens."""
        names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")
        return any(map(self.config.get, names))

    @property
    def is_rounded(self) -> bool:
        """Whether it runs below FP64. Passes of the others round as those of some that do."""
        is_long = self.prompt_tokens == LONG_TOKENS and not self.ring
        is_deep = "num_layers" in self.config
        return not (is_long or is_deep or self.is_across or self.ddp)

    @property
    def calls(self) -> int:
        """Of a run."""
        is_spread = self.expert_parallel > 1 and self.weights is torch.bfloat16
        return CALLS_OF_EXPERTS if is_spread else CALLS_OF[self.weights]

    @property
    def is_across(self) -> bool:
        """Whether rows of all replicas share prompts."""
        return self.share.get("across_replicas", False)

    @property
    def prompt_forwards(self) -> int:
        """How often a prompt runs forward in a call: again where no graph is kept."""
        is_twice = self.share.get("graphs") == "twice" or self.expert_parallel > 1 or self.ring
        return 2 if is_twice or self.stages > 1 else 1

    @property
    def has_all_rows(self) -> bool:
        """Whether a rank runs all rows of its responses, and no others."""
        is_alone = self.context_parallel == self.expert_parallel == 1
        is_padded = self.config.get("sequence_parallel", False) or self.is_balanced
        return is_alone and not (is_padded or self.is_across)

    @property
    def layers(self) -> int:
        """Of a part of the model."""
        return self.config.get("num_layers", LAYERS) // (self.stages * self.chunks)

    @property
    def columns(self) -> int:
        """Of the longest rows."""
        columns = COLUMNS_MAX - PROMPT_TOKENS + self.prompt_tokens
        return -(-columns // COLUMNS_UNIT) * COLUMNS_UNIT

    def of_dtype(self, dtype: torch.dtype) -> Case:
        return dataclasses.replace(self, dtype=dtype, weights=dtype)

    @property
    def wide(self) -> Case:
        """The same with wide layers, in which short prompts sleep: storages below 64 KiB stay
        awake."""
        width = {"ffn_hidden_size": WIDE}
        if "num_moe_experts" in self.config:
            width["moe_ffn_hidden_size"] = WIDE
        return dataclasses.replace(self, config=self.config | width)

    @property
    def alone(self) -> Case:
        """The same model where each rank has whole rows."""
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


def tripled(loss: torch.Tensor) -> torch.Tensor:
    """A ``grad_scale_func``: of losses of routers, too."""
    return 3 * loss


SCALED = BALANCED | {"grad_scale_func": tripled}
ACROSS = {"across_replicas": True, "microbatch_tokens": 9}
CASES = {
    "one rank": Case(),
    "twice": Case(share={"graphs": "twice", "microbatch_tokens": 9}),
    "awake": Case(share={"sleep": False, "graphs": "kept"}),
    # A check of twice as many tokens as the one before would go beyond the last position.
    "learned positions, biases": Case(
        config=PLAIN_GELU, model={"position_embedding_type": "learned_absolute"}, prompt_tokens=26
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
        config=SCALED | {"calculate_per_token_loss": True},
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
    "two parts, long prompts": Case(2, 2, prompt_tokens=LONG_TOKENS),
    "two parts of a sequence, long prompts": Case(
        2, 2, config={"sequence_parallel": True, "ffn_hidden_size": WIDE}, prompt_tokens=LONG_TOKENS
    ),
    "four stages, long prompts": Case(
        4, stages=4, prompt_tokens=LONG_TOKENS, share={"microbatch_tokens": 9, "prompt_chunks": 1}
    ),
    "two stages of two parts of a sequence, long prompts": Case(
        4,
        2,
        2,
        config={"sequence_parallel": True, "ffn_hidden_size": WIDE},
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9, "prompt_chunks": 1},
    ),
    "two stages of two replicas, long prompts": Case(
        4, stages=2, prompt_tokens=LONG_TOKENS, share={"microbatch_tokens": 9, "prompt_chunks": 1}
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
    "two stages of three chunks": Case(
        2,
        stages=2,
        chunks=3,
        config=INTERLEAVED | {"num_layers": 6},
        share={"microbatch_tokens": 9},
    ),
    "four stages of two chunks": Case(
        4,
        stages=4,
        chunks=2,
        # Megatron's turns have as many microbatches as there are stages, or more.
        config=INTERLEAVED | {"num_layers": 8, "microbatch_group_size_per_vp_stage": 6},
        share={"microbatch_tokens": 9},
        microbatch_rows=1,
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
    "two stages of two chunks, a layer each, long prompts": Case(
        2,
        stages=2,
        chunks=2,
        config=INTERLEAVED,
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
    "two stages, experts, balanced, long prompts": Case(
        2,
        stages=2,
        config=SCALED,
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9, "prompt_chunks": 2},
    ),
    "two stages of two chunks, experts, balanced, prompts in chunks": Case(
        2,
        stages=2,
        chunks=2,
        config=BALANCED | INTERLEAVED | {"calculate_per_token_loss": True},
        per_token=True,
        share={"microbatch_tokens": 9, "prompt_chunks": 3},
    ),
    "two stages, experts of the second, balanced by biases": Case(
        2,
        stages=2,
        config=EXPERTS
        | {
            "moe_layer_freq": [0, 0, 1, 0],
            "moe_router_bias_update_rate": 0.05,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_z_loss_coeff": 0.2,
        },
        share={"microbatch_tokens": 9, "sleep": False},
    ),
    "four stages, experts of some, balanced": Case(
        4,
        stages=4,
        config=BALANCED | {"moe_layer_freq": [1, 0, 1, 1]},
        share={"microbatch_tokens": 9, "prompt_chunks": 2},
    ),
    "two stages of two parts of a sequence, experts, balanced": Case(
        4,
        2,
        2,
        config=BALANCED | {"sequence_parallel": True},
        share={"microbatch_tokens": 9, "prompt_chunks": 2},
    ),
    "two stages, experts on two ranks, balanced": Case(
        4, stages=2, expert_parallel=2, config=BALANCED, share={"microbatch_tokens": 9}
    ),
    "two stages of two chunks, two replicas, balanced over both": Case(
        4,
        stages=2,
        chunks=2,
        config=BALANCED | INTERLEAVED,
        ddp={"overlap_grad_reduce": True},
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
    "context on two ranks, two parts of a sequence, long prompts": Case(
        4,
        2,
        context_parallel=2,
        config={"sequence_parallel": True, "ffn_hidden_size": WIDE},
        prompt_tokens=LONG_TOKENS,
        share={"microbatch_tokens": 9},
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
    "context on two ranks, experts, balanced, long prompts": Case(
        2,
        context_parallel=2,
        config=BALANCED,
        share={"microbatch_tokens": 9},
        prompt_tokens=LONG_TOKENS,
    ),
    "context on two ranks, experts on both, balanced, per token": Case(
        2,
        expert_parallel=2,
        context_parallel=2,
        config=SCALED | {"calculate_per_token_loss": True},
        per_token=True,
        share={"microbatch_tokens": 9},
    ),
    "context on two ranks, experts on four, balanced, a third prompt of one": Case(
        4,
        expert_parallel=4,
        context_parallel=2,
        config=BALANCED,
        share={"microbatch_tokens": 9},
        has_third=True,
    ),
    "context on two ranks, experts, balanced by biases": Case(
        2,
        context_parallel=2,
        config=EXPERTS
        | {
            "moe_layer_freq": [1, 0, 1, 1],
            "moe_router_bias_update_rate": 0.05,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
        share={"sleep": False, "graphs": "kept"},
    ),
    "context on two ranks, ring, experts, balanced": Case(
        2,
        context_parallel=2,
        config=BALANCED,
        share={"microbatch_tokens": 9},
        ring=True,
    ),
    "context on two ranks, two parts of a sequence, experts, balanced": Case(
        4, 2, context_parallel=2, config=BALANCED | {"sequence_parallel": True}
    ),
    "context on two ranks, two replicas, balanced over both": Case(
        4, context_parallel=2, config=BALANCED, share={"microbatch_tokens": 9}
    ),
    "two stages, context on two ranks, experts, balanced": Case(
        4,
        stages=2,
        context_parallel=2,
        config=BALANCED,
        share={"microbatch_tokens": 9},
    ),
    "two replicas, prompts of both": Case(2, share=ACROSS),
    "two replicas, prompts of both, overlapped, long prompts": Case(
        2,
        config={"calculate_per_token_loss": True},
        ddp={"overlap_grad_reduce": True, "bucket_size": 1000},
        per_token=True,
        share=ACROSS | {"graphs": "twice"},
        prompt_tokens=LONG_TOKENS,
    ),
    "two replicas, prompts of both, awake": Case(
        2, share={"across_replicas": True, "sleep": False, "graphs": "kept"}
    ),
    "experts on two ranks, prompts of both": Case(
        2, expert_parallel=2, config=EXPERTS, share=ACROSS
    ),
    "four replicas, prompts of all": Case(4, share=ACROSS),
    "two parts of a sequence, two replicas, prompts of both": Case(
        4, 2, config={"sequence_parallel": True}, share=ACROSS
    ),
    "two stages, two replicas, prompts of both in chunks": Case(
        4, stages=2, share=ACROSS | {"prompt_chunks": 2}
    ),
    "two stages of two chunks, experts on two ranks, prompts of both": Case(
        4,
        stages=2,
        chunks=2,
        expert_parallel=2,
        config=EXPERTS | INTERLEAVED,
        share=ACROSS,
    ),
    "context on two ranks, two replicas, prompts of both": Case(
        4, context_parallel=2, share=ACROSS
    ),
    "two replicas": Case(2, 1),
    "two replicas, sharded optimizer": Case(2, 1, ddp={"use_distributed_optimizer": True}),
    "two replicas, overlapped": Case(2, 1, ddp={"overlap_grad_reduce": True, "bucket_size": 1000}),
}
