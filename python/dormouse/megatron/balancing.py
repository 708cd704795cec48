"""Losses and counts that balance experts, where one row stands for several.

Megatron's routers add such a loss to the gradients of their scores. Once the counts of tokens per
expert are known, it is a sum over rows of scores times numbers that have no gradient. So the
forwards of a call count, for each of the trainer's rows: the counts of a prompt belong to every row
that has it. From all counts follow the numbers of each of the trainer's rows. Those of a prompt's
row are the sum of the numbers of the rows for which it stands. Backwards, which begin after the
last forward, read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

from .. import _native as native
from ..hf.padded import Places
from ..schedule import Op, Plan
from .batches import Microbatch

OF_MICROBATCHES, OF_SEQUENCES, GLOBAL = "aux_loss", "seq_aux_loss", "global_aux_loss"
Z = "z_loss"
# Index of rows without an owner: those of dummies and padding.
NO_OWNER = 0
# By which Megatron logs losses of scores, in the order in which its routers add them.
NAMES = {
    OF_MICROBATCHES: "load_balancing_loss",
    OF_SEQUENCES: "seq_load_balancing_loss",
    GLOBAL: "global_load_balancing_loss",
}


def routers_of(gpt: GPTModel) -> list[TopKRouter | None]:
    """Returns the router of each layer; None for a layer without experts."""
    mlps = [getattr(layer, "mlp", None) for layer in gpt.decoder.layers]
    return [mlp.router if isinstance(mlp, MoELayer) else None for mlp in mlps]


def coefficients_of(config: TransformerConfig) -> dict[str, float]:
    """Returns the coefficient of each loss of scores that routers add in training, in the order of
    :data:`NAMES`."""
    kinds, values = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, values = [kinds], [values]
    found: dict[str, float] = {}
    for kind, value in zip(kinds, values, strict=True):
        if kind in NAMES:
            # Megatron takes the first of equal kinds.
            found.setdefault(kind, value)
    has_losses = any(value > 0 for value in found.values())
    return {kind: found[kind] for kind in NAMES if has_losses and found.get(kind, 0) != 0}


def adds_losses(gpt: GPTModel) -> bool:
    """Returns whether routers add losses: those of the whole model, of which ``gpt`` may be a part
    without any."""
    config = gpt.config
    if not gpt.training or config.num_moe_experts is None:
        return False
    return config.moe_z_loss_coeff is not None or bool(coefficients_of(config))


def balances(gpt: GPTModel) -> bool:
    """Returns whether routers add losses or count tokens, likewise. They count in evaluation mode,
    too, where there are gradients."""
    counts = gpt.config.num_moe_experts is not None and gpt.config.moe_router_enable_expert_bias
    return counts or adds_losses(gpt)


def ends_at_router(gpt: GPTModel) -> bool:
    """Returns whether a prefix ends at the last layer's router, not at its K and V. That of a
    pipeline stage before the last ends at its hidden states."""
    return gpt.post_process and balances(gpt) and routers_of(gpt)[-1] is not None


class Balancing:
    """Counts and numbers of one call.

    Tables are indexed by owner: index 0 has the rows without an owner, then follow the trainer's
    rows, then the groups. A group owns the rows of its prompt.
    """

    def __init__(
        self, gpt: GPTModel, microbatches: Sequence[Microbatch] = (), places: Sequence[Places] = ()
    ):
        """``microbatches``: of the trainer, with whole rows. ``places``: the groups of the passes.
        Without either no row has an owner."""
        self._gpt, self._places = gpt, list(places)
        # They have parts of the same rows of the trainer's.
        self._same_rows = parallel_state.get_tensor_and_context_parallel_group()
        layers, experts = len(gpt.decoder.layers), gpt.config.num_moe_experts
        self._device = next(gpt.parameters()).device
        self._microbatches = len(microbatches)
        # Of each of the trainer's rows: its microbatch, and that one's rows, columns and tokens.
        shapes = [(i, *each.tokens.shape) for i, each in enumerate(microbatches)]
        of_rows = [shape for shape in shapes for _ in range(shape[1])]
        table = torch.tensor(of_rows, dtype=torch.int64, device=self._device).reshape(-1, 3)
        self._rows = len(table)
        self._microbatch, self._microbatch_rows, self._columns = table.T
        self._tokens = (self._microbatch_rows * self._columns).double()
        owners = 1 + self._rows + len(self._places)
        zeros = self._zeros
        self._counts, self._scores = zeros(layers, owners, experts), zeros(layers, owners, experts)
        self._selected, self._squares = zeros(layers, owners, experts), zeros(layers, owners)
        self.of_scores, self.of_squares = zeros(layers, owners, experts), zeros(owners)
        """What gradients of scores are, per unit of the losses' scale, and those of squares."""
        self._counting = self._rows > 0
        self._expected: list[torch.Tensor] = []

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._device)

    @property
    def _groups(self) -> int:
        """The first owner that is a group."""
        return 1 + self._rows

    def begin(self, places: Places, plan: Plan) -> None:
        """Called before the passes of a group: they come in the order of the plan, dummies last."""
        number = next(i for i, each in enumerate(self._places) if each is places)
        self._expected = []

        def length(rows: dict) -> int:
            return rows["end"] - rows["begin"]

        # Its own ops are completed as they are yielded.
        for op in json.loads(plan.to_json())["ops"]:
            if op["kind"] == "prefix_forward":
                self._expect(number, prompt_rows=length(op["tokens"]))
            elif op["kind"] == "microbatch":
                rows = [(each["sequence"], length(each["rows"])) for each in op["members"]]
                self._expect(number, response_rows=rows)

    def begin_op(self, number: int, op: Op | None) -> None:
        """Called before the pass of a forward of a group by itself. ``number``: of the group.
        ``op``: None: a dummy microbatch."""
        self._expected = []
        if op is None:
            return
        if op.kind is native.OpKind.PREFIX_FORWARD:
            self._expect(number, prompt_rows=len(op.tokens))
        else:
            rows = [(each.sequence, len(each.rows)) for each in op.members]
            self._expect(number, response_rows=rows)

    def _expect(
        self, number: int, prompt_rows: int = 0, response_rows: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Keeps the owners of a pass of a group. ``response_rows``: number of the response, and of
        its rows."""
        spans = [(self._groups + number, prompt_rows)] if prompt_rows else []
        spans += [(self._owner_of(number, each), rows) for each, rows in response_rows]
        owners = [torch.full((rows,), owner) for owner, rows in spans]
        self._expected.append(torch.cat(owners).to(self._device))

    def _owner_of(self, number: int, response: int) -> int:
        row = self._places[number].rows[response]
        return NO_OWNER if row == self._rows else 1 + row

    def owners(self, rows: int) -> torch.Tensor:
        """Returns the owners of the next pass, which has ``rows`` rows on all ranks together,
        without padding."""
        if not self._expected:
            return torch.full((rows,), NO_OWNER, device=self._device)
        own = self._expected.pop(0)
        if len(own) != rows:
            raise RuntimeError(f"a pass has {rows} rows, and {len(own)} in the plan")
        return own

    def count(self, layer: int, owners: torch.Tensor, counted: torch.Tensor, scores, squares):
        """Counts rows of a forward. ``counted``: the experts of their highest scores."""
        if self._counting:
            self._counts[layer].index_add_(0, owners, counted.double())
            self._scores[layer].index_add_(0, owners, scores.detach().double())
            self._squares[layer].index_add_(0, owners, squares.detach().double())

    def count_selected(self, layer: int, owners: torch.Tensor, selected: torch.Tensor) -> None:
        """Counts the experts that rows of a forward go to."""
        if self._counting:
            self._selected[layer].index_add_(0, owners, selected.double())

    def settle(self) -> None:
        """Called after the last forward: finds what the backwards read, logs the losses, and adds
        the counts to those of the routers. Collective of the tensor- and context-parallel ranks,
        and with a global loss of the data-parallel ones."""
        self._counting = False
        config = self._gpt.config
        counts = _summed(self._of_rows(self._counts), self._same_rows)
        of_scores, of_squares = self._zeros(*counts.shape), self._zeros(self._rows)
        has_losses = adds_losses(self._gpt)
        # First, as routers do: replicas reduce what is logged in the order of its first arrival.
        if has_losses and config.moe_z_loss_coeff is not None:
            # In Megatron each rank logs the mean of its own rows: here, as they are others, of all.
            squares = _summed(self._of_rows(self._squares), self._same_rows)
            self._log(Z, (squares / self._tokens).sum(1))
            of_squares += config.moe_z_loss_coeff / self._tokens * self._loss_tokens(Z)
        for kind, coefficient in (coefficients_of(config) if has_losses else {}).items():
            factors = self._factors(kind, counts)
            self._log(kind, (factors * self._of_rows(self._scores)).sum((1, 2)))
            of_scores += coefficient * factors * self._loss_tokens(kind)[:, None]
        self._give(of_scores, of_squares)
        if config.moe_router_enable_expert_bias:
            selected = self._of_rows(self._selected).sum(1)
            for layer, router in enumerate(routers_of(self._gpt)):
                if router is not None:
                    router.local_tokens_per_expert += selected[layer]

    def _give(self, of_scores: torch.Tensor, of_squares: torch.Tensor) -> None:
        """Stores the numbers of the trainer's rows; a prompt's are the sums of its rows'."""
        self.of_scores[:, 1 : self._groups] = of_scores
        self.of_squares[1 : self._groups] = of_squares
        groups = self._groups + self._group_of_row()
        self.of_scores.index_add_(1, groups, of_scores)
        self.of_squares.index_add_(0, groups, of_squares)

    def _factors(self, kind: str, counts: torch.Tensor) -> torch.Tensor:
        """Returns by what a loss, of a coefficient of 1, multiplies the scores of each row. See
        ``switch_load_balancing_loss_func`` of Megatron. ``counts``: of each row."""
        if kind == OF_SEQUENCES:
            shares = counts / (self._columns**2 * self._microbatch_rows)[:, None]
        else:
            totals, replicas = self._in_microbatches(counts), 1
            if kind == GLOBAL:
                totals, replicas = self._so_far(totals)
            shares = totals[:, self._microbatch] / (self._tokens * replicas)[:, None] ** 2
        return shares * self._gpt.config.num_moe_experts / self._gpt.config.moe_router_topk

    def _loss_tokens(self, kind: str) -> torch.Tensor:
        """Returns by how many tokens Megatron multiplies the loss of each row: this rank's, where
        gradients are divided by the number of all."""
        if not self._gpt.config.calculate_per_token_loss:
            return torch.ones_like(self._tokens)
        tokens = self._columns if kind == OF_SEQUENCES else self._tokens
        return tokens / self._same_rows.size()

    def _group_of_row(self) -> torch.Tensor:
        found = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        for number, each in enumerate(self._places):
            found[[row for row in each.sharing_rows if row != self._rows]] = number
        return found

    def _of_rows(self, table: torch.Tensor) -> torch.Tensor:
        """Returns a table of the trainer's rows: their own, and their prompts'."""
        return table[:, 1 : self._groups] + table[:, self._groups + self._group_of_row()]

    def _in_microbatches(self, counts: torch.Tensor) -> torch.Tensor:
        layers, _, experts = counts.shape
        found = self._zeros(layers, self._microbatches, experts)
        return found.index_add_(1, self._microbatch, counts)

    def _so_far(self, counts: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns what Megatron takes for the counts of each microbatch in a global loss: the mean
        of the steps up to it, of all replicas; and their number."""
        group = parallel_state.get_data_parallel_group()
        counts = _summed(counts, group).cumsum(1)
        steps = torch.arange(1, self._microbatches + 1, device=self._device)
        for layer, router in enumerate(routers_of(self._gpt)):
            if router is not None:
                counts[layer] += router.global_tokens_per_expert
                router.global_tokens_per_expert.copy_(counts[layer, -1])
                counts[layer] /= (steps + router.ga_steps)[:, None]
                router.ga_steps += self._microbatches
        return counts, group.size()

    def _log(self, kind: str, values: torch.Tensor) -> None:
        """Adds the sums over microbatches to Megatron's tracker. ``values``: of each layer."""
        for router, value in zip(routers_of(self._gpt), values, strict=True):
            if router is None:
                continue
            groups = {}
            if kind in NAMES:
                group = router.tp_dp_cp_group if kind == GLOBAL else router.tp_cp_group
                groups = {"reduce_group": group, "reduce_group_has_dp": kind == GLOBAL}
            name, layers = NAMES.get(kind, kind), self._gpt.config.num_layers
            moe_utils.save_to_aux_losses_tracker(
                name, value.float(), router.layer_number, layers, **groups
            )


def set_scale(config: TransformerConfig, microbatches: int, device: torch.device) -> None:
    """Sets by what gradients of routers' losses are multiplied, as Megatron's schedule does at each
    of its forwards: for a pipeline stage where it runs none. ``config``: of the schedule."""
    scale = torch.ones(1, device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    if not config.calculate_per_token_loss:
        scale = scale * config.context_parallel_size / microbatches
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(scale)


def _summed(table: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1:
        table = table.clone()
        dist.all_reduce(table, group=group)
    return table
