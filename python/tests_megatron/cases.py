"""Small GPT models, batches of rollouts, and Megatron's schedule over them, by the cases of
case_table.py.

Every case runs plainly, shared, and in FP64 plainly, which is the truth (docs/method.md §10).
"""

from __future__ import annotations

import copy
import socket
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
# Those that are not used here are for the other files of this folder.
from case_table import (  # noqa: F401
    ACROSS,
    BALANCED,
    CALLS,
    CALLS_OF,
    CASES,
    COLUMNS_MAX,
    COLUMNS_UNIT,
    EXPERTS,
    HIDDEN,
    INTERLEAVED,
    LAYERS,
    LONG_TOKENS,
    PROMPT_TOKENS,
    VOCABULARY,
    Case,
)
from dormouse.megatron.refusals import unwrapped
from process_groups import destroy_groups
from rooms import room_of

Tensors = dict[str, torch.Tensor]
# Standard deviation, beside 0.15 of what weights begin with.
EXPERT_NOISE = 0.1


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

    def _preprocess(self, input_ids, position_ids, *args, **named):
        # Megatron's rows are those of the first column, then those of the second.
        ByToken.tokens, ByToken.positions = (
            each.T.reshape(-1) for each in (input_ids, position_ids)
        )
        return super()._preprocess(input_ids, position_ids, *args, **named)


class ExactRecordedGPT(RecordedGPT, ExactGPT):
    """Both."""


class Gather(torch.autograd.Function):
    """Rows of all ranks, in the order of ranks. torch's own has no backward over gloo in groups
    without rank 0."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        found = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(found, rows.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(dormouse.megatron.ContextAttention):
    """Outside shared passes Megatron's own attention over whole rows, which context-parallel ranks
    gather: Megatron's for this needs Transformer Engine."""

    def forward(self, query, key, value, attention_mask, **named):
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return super().forward(query, key, value, attention_mask, **named)
        whole = torch.arange(len(query) * group.size())
        (columns,) = get_batch_on_this_cp_rank({"columns": whole[None]})["columns"]
        places = Gather.apply(columns, group).argsort()
        rows = (Gather.apply(each, group)[places] for each in (query, key, value))
        return DotProductAttention.forward(self, *rows, attention_mask, **named)[columns]


class PartialNorm(torch.nn.RMSNorm):
    """Of a part of the sequence: Megatron's norm for this needs Transformer Engine or Apex."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def chunks_of(case: Case) -> list[torch.nn.Module]:
    """Returns this stage's parts of the model, each in Megatron's DistributedDataParallel."""
    config = config_of(case)
    configs = [config] * case.chunks
    if case.own_configs:
        configs[1:] = [_without_scale(config) for _ in configs[1:]]
    chunks = [_chunk_of(case, *each) for each in zip(configs, range(case.chunks), strict=True)]
    no_sync = [each.no_sync for each in chunks]
    config.no_sync_func = no_sync if case.chunks > 1 else no_sync[0]
    config.finalize_model_grads_func = expert_counts.finalize
    return chunks


def _without_scale(config: TransformerConfig) -> TransformerConfig:
    """Returns a copy whose losses have no scale."""
    found = copy.copy(config)
    found.grad_scale_func = None
    return found


def model_of(case: Case) -> torch.nn.Module:
    """Returns the one part of :func:`chunks_of`."""
    (chunk,) = chunks_of(case)
    return chunk


def config_of(case: Case) -> TransformerConfig:
    settings = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
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
    _part_experts(model)
    config.params_dtype = config.pipeline_dtype = case.dtype
    model = model.to(case.weights).to(case.dtype)
    model = Float16Module(config, model) if config.bf16 else model
    return DistributedDataParallel(config, DistributedDataParallelConfig(**case.ddp), model)


def _part_experts(model: torch.nn.Module) -> None:
    """Makes experts of different ranks different. Megatron initializes those of each rank alike, so
    with one on each rank routers had no gradient, and tokens could go to any."""
    generator = torch.Generator()
    generator.manual_seed(100 + parallel_state.get_expert_model_parallel_rank())
    for parameter in model.parameters():
        if not getattr(parameter, "allreduce", True):
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(EXPERT_NOISE * noise)


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
    return GatheredAttention if config.context_parallel_size > 1 else DotProductAttention


def _set_core_attention(config: TransformerConfig, layer: ModuleSpec) -> None:
    layer.submodules.self_attention.submodules.core_attention = core_attention_of(config)


def batches_of(*args, **named) -> list[dict]:
    """Returns what this rank has of :func:`whole_batches_of`."""
    return list(map(part_of, whole_batches_of(*args, **named)))


def whole_batches_of(
    call: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    columns: int = COLUMNS_MAX,
    replica: int | None = None,
    *,
    is_across: bool = False,
    has_third: bool = False,
    microbatch_rows: int = 2,
) -> list[dict]:
    """Returns the microbatches of this rank's replica, or of another: rows of two prompts in any
    order, one of which has a response of a single token, one holes in its loss and one no loss,
    with padding behind. ``is_across``: replicas have the same prompts. ``has_third``: every second
    one has a third prompt."""
    rank = parallel_state.get_data_parallel_rank() if replica is None else replica
    is_interleaved = parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None
    generator = torch.Generator().manual_seed(10 * call + rank)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (count,), generator=generator)

    if is_across:
        own, generator = generator, torch.Generator().manual_seed(10 * call)
    prompts = draw(prompt_tokens), draw(prompt_tokens - 8)
    generator = own if is_across else generator
    # Replicas differ in what fits into a microbatch of 9 tokens.
    rows = [(0, 9 - 4 * (rank % 2)), (1, 5), (0, 1), (0, 14), (1, 0), (1, 11)]
    if has_third and rank % 2:
        prompts, rows = [*prompts, draw(prompt_tokens - 4)], [*rows[:-1], (2, 11)]
    found = []
    for place in range(0, len(rows), microbatch_rows):
        own = []
        for prompt, response in rows[place : place + microbatch_rows]:
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
                # That of one row may be 0.
                "count": masks.sum().clamp(min=1),
            }
        )
    return found


def rollouts_of(batches: list[dict], *, whole: bool) -> dict[tuple[int, ...], int]:
    """Returns the prompts of whole rows, and how many tokens all responses to each have, which end
    at their last loss. ``whole``: they end at the last column, and rows without a loss have a
    prompt of two tokens."""
    found: dict[tuple[int, ...], int] = {}
    for batch in batches:
        for tokens, mask in zip(batch["tokens"].tolist(), batch["loss_mask"].tolist(), strict=True):
            columns = [column for column, each in enumerate(mask) if each]
            if not columns and not whole:
                continue
            first = columns[0] if columns else 1
            end = len(mask) if whole else columns[-1] + 1
            prompt = tuple(tokens[: first + 1])
            found[prompt] = found.get(prompt, 0) + end - first
    return found


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
        "micro_batch_size": case.microbatch_rows,
    }


def run(case: Case, function, ddp, batches: list[dict], **named) -> list:
    """Runs a schedule once, from zero gradients; returns what the loss function returned.
    ``ddp``: a model, or its parts. ``named``: other arguments of the schedule, or other values."""
    chunks = ddp if isinstance(ddp, list) else [ddp]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    try:
        return function(**arguments_of(case, chunks, batches) | named)
    finally:
        for chunk in chunks:
            _forget_graphs(chunk)


def gradients(ddp) -> Tensors:
    """Returns copies of this rank's gradients, as an optimizer would find them."""
    return {
        f"{number}.{name}": parameter.main_grad.clone()
        for number, chunk in enumerate(ddp if isinstance(ddp, list) else [ddp])
        for name, parameter in unwrapped(chunk).named_parameters()
    }


def trained(case: Case, runtime: dormouse.Runtime | None) -> dict:
    """Returns gradients and what was logged, of each call. ``runtime``: with shared prompts."""
    ddp, function = chunks_of(case), get_forward_backward_func()
    bytes_sent: list[tuple[int, int]] = []
    asleep: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []
    passes: list[counted.Passes] = []
    gpt = unwrapped(ddp[0])
    if runtime is not None:
        function = dormouse.megatron.share(function, runtime=runtime, **case.share)
    found = {"gradients": [], "losses": [], "balance": [], "rollouts": []}
    moe_utils.clear_aux_losses_tracker()
    for call in range(case.calls):
        sizes = case.prompt_tokens, case.columns
        names = ("is_across", "has_third", "microbatch_rows")
        rows = {name: getattr(case, name) for name in names}
        whole = whole_batches_of(call, *sizes, **rows)
        found["rollouts"].append(rollouts_of(whole, whole=case.is_balanced))
        batches = list(map(part_of, whole))
        room = room_of(gpt, case.prompt_tokens, is_ring=case.ring)
        with counted.of_call(gpt, bytes_sent, asleep, held, passes), room:
            found["losses"].append(run(case, function, ddp, batches))
        found["gradients"].append(gradients(ddp))
        found["balance"].append(expert_counts.balance(ddp))
    if runtime is not None:
        found["sharing"] = function.sharing
        found["bytes"], found["asleep"], found["held"] = bytes_sent, asleep, held
        found["passes"] = passes
        found["open"] = runtime.stats()["asleep"]["current_bytes"]
    return found


def _forget_graphs(part: torch.nn.Module) -> None:
    """Drops what dispatchers of experts keep of the last microbatch: graphs, through which a model
    with its process groups would hold itself, unseen by Python."""
    for module in part.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        for name, value in list(vars(dispatcher).items()) if dispatcher else ():
            if torch.is_tensor(value) and value.requires_grad:
                setattr(dispatcher, name, None)


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
