"""A batch's ops, carried out with detached leaves and accumulators, give the dense gradient.

The executor below is all a trainer has to do: it looks at nothing but ops, nodes and token ids. Two
layers of causal attention in FP64, so every error that is one shows.
"""

from __future__ import annotations

import random

import pytest
import torch
from models import largest
from torch.nn.functional import cross_entropy

from dormouse import ArgumentError, Forest, ModelShape, Plan
from dormouse._native import OpKind
from dormouse.schedule import Machine, collective_order, shares

VOCAB, WIDTH, HEADS, LAYERS, LONGEST = 7, 8, 2, 2, 40
TOLERANCE = 1e-10
SHAPE = ModelShape(
    layers=LAYERS,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=WIDTH // HEADS,
    vocab=VOCAB,
    dtype_bytes=8,
    layer_linear_weights=4 * WIDTH * WIDTH,
    kv_linear_weights=2 * WIDTH * WIDTH,
    last_layer_prefix_weights=2 * WIDTH * WIDTH,
    head_weights=VOCAB * WIDTH,
    saved_bytes_per_token_layer=256,
)


class Tiny:
    """Rows in, hidden rows and their keys and values out."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)

        def weight(*shape):
            values = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return (values / WIDTH**0.5).requires_grad_()

        self.tokens, self.places = weight(VOCAB, WIDTH), weight(LONGEST, WIDTH)
        self.layers = [[weight(WIDTH, WIDTH) for _ in range(4)] for _ in range(LAYERS)]
        self.head = weight(WIDTH, VOCAB)

    def parameters(self):
        return [self.tokens, self.places, self.head, *sum(self.layers, [])]

    def run(self, ids, first, past):
        """Rows from position ``first`` on, which read ``past``: a pair of tensors a layer."""
        places = torch.arange(first, first + len(ids))
        hidden, made = self.tokens[torch.tensor(ids)] + self.places[places], []
        for (query, key, value, out), (past_keys, past_values) in zip(
            self.layers, past, strict=True
        ):
            keys, values = hidden @ key, hidden @ value
            made.append((keys, values))
            hidden = (
                hidden
                + self.attend(
                    hidden @ query, torch.cat([past_keys, keys]), torch.cat([past_values, values])
                ).tanh()
                @ out
            )
        return hidden, made

    @staticmethod
    def attend(queries, keys, values):
        def heads(rows):
            return rows.view(len(rows), HEADS, -1).transpose(0, 1)

        hidden = torch.arange(len(keys)) > torch.arange(len(queries))[:, None] + len(keys) - len(
            queries
        )
        scores = heads(queries) @ heads(keys).transpose(1, 2)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ heads(values)).transpose(0, 1).reshape(len(queries), -1)

    def loss(self, hidden, labels):
        return cross_entropy(hidden @ self.head, torch.tensor(labels), reduction="sum")


def nothing():
    return torch.zeros(0, WIDTH, dtype=torch.float64)


def gradients(model, work):
    for parameter in model.parameters():
        parameter.grad = None
    work()
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def dense(model, sequences, labels, weights):
    """Every sequence by itself; ``labels`` are the positions that carry loss."""
    for ids, positions, weight in zip(sequences, labels, weights, strict=True):
        if positions:
            hidden, _ = model.run(ids, 0, [(nothing(), nothing())] * LAYERS)
            rows = hidden[[position - 1 for position in positions]]
            (weight * model.loss(rows, [ids[position] for position in positions])).backward()


class Executor:
    """Carries a plan out. ``mutant``: what it forgets, to see that the test would notice."""

    def __init__(self, model, plan, sequences, mutant=""):
        self.model, self.plan, self.sequences, self.mutant = model, plan, sequences, mutant
        self.nodes = plan.nodes()
        self.leaves, self.sums, self.graphs = {}, {}, {}
        self.kinds = []

    def work(self):
        for op in self.plan:
            self.kinds.append((op.kind, op.without_graph))
            {
                OpKind.PREFIX_FORWARD: self.forward,
                OpKind.FORWARD_AGAIN: self.again,
                OpKind.MICROBATCH: self.microbatch,
                OpKind.PREFIX_BACKWARD: self.backward,
            }[op.kind](op)
        assert not self.leaves and not self.sums and not self.graphs, "what was held is let go"

    def path(self, node):
        """A node and its ancestors, the root first."""
        found = []
        while node is not None:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def past(self, reads):
        """Keys and values of each layer along the path."""
        path = self.path(reads)
        return [
            tuple(
                torch.cat([nothing(), *(self.leaves[n][layer][side] for n in path)])
                for side in (0, 1)
            )
            for layer in range(LAYERS)
        ]

    def run(self, op):
        node = self.nodes[op.node]
        assert node.rows == op.tokens and node.parent == op.reads
        ids = self.sequences[node.sequence][op.tokens.start : op.tokens.stop]
        return self.model.run(ids, op.tokens.start, self.past(op.reads))

    def forward(self, op):
        with torch.set_grad_enabled(not op.without_graph):
            hidden, made = self.run(op)
        if not op.without_graph:
            self.graphs[op.node] = hidden, made
        leaf = [tuple(side.detach().requires_grad_() for side in pair) for pair in made]
        self.leaves[op.node] = leaf
        self.sums[op.node] = [tuple(torch.zeros_like(side) for side in pair) for pair in leaf]

    def again(self, op):
        assert op.node not in self.graphs
        self.graphs[op.node] = self.run(op)

    def microbatch(self, op):
        past = self.past(op.reads)
        rows = [
            self.model.run(
                self.sequences[it.sequence][it.first_position : it.first_position + len(it.rows)],
                it.first_position,
                past,
            )[0]
            for it in op.members
        ]
        hidden = torch.cat(rows)
        loss = self.scored(op, hidden)
        if loss is not None:
            loss.backward()
            self.accumulate(op.reads)

    def backward(self, op):
        hidden, made = self.graphs.pop(op.node)
        sums = self.sums.pop(op.node)
        outputs = [side for pair in made for side in pair]
        seeds = [side for pair in sums for side in pair]
        loss = self.scored(op, hidden)
        if loss is not None:
            outputs.append(loss)
            seeds.append(torch.ones_like(loss))
        torch.autograd.backward(outputs, seeds)
        del self.leaves[op.node]
        self.accumulate(op.reads)

    def scored(self, op, hidden):
        scores = op.scores[1:] if self.mutant == "score" else op.scores
        losses = [
            it.weight
            * self.model.loss(
                hidden[it.rows.start : it.rows.stop],
                self.sequences[it.sequence][it.first_label : it.first_label + len(it.rows)],
            )
            for it in scores
        ]
        return sum(losses) if losses else None

    def accumulate(self, reads):
        for node in self.path(reads):
            for leaf, total in zip(self.leaves[node], self.sums[node], strict=True):
                for side, into in zip(leaf, total, strict=True):
                    if side.grad is not None and not (self.mutant == "accumulator" and node == 0):
                        into += side.grad
                    side.grad = None


def batch(seed):
    """Sequences with nested ends, duplicates and losses inside nodes; labels and weights."""
    pick = random.Random(seed)
    sequences = [[pick.randrange(VOCAB) for _ in range(pick.randint(1, 12))] for _ in range(2)]
    while len(sequences) < 14:
        kept = pick.choice(sequences)
        kept = kept[: pick.randint(1, len(kept))]
        more = [pick.randrange(VOCAB) for _ in range(pick.choice([0, 0, 1, 4, 9]))]
        sequences.append((kept + more)[:LONGEST])
    sequences.append(list(sequences[3]))
    spans = []
    for ids in sequences:
        cuts = sorted(pick.sample(range(1, len(ids) + 1), k=min(4, len(ids)) // 2 * 2))
        spans.append(list(zip(cuts[::2], cuts[1::2], strict=True)))
    weights = [pick.uniform(-1, 2) for _ in sequences]
    return sequences, spans, weights


def plan_of(sequences, **options):
    with Forest.from_ids(sequences, vocab=VOCAB) as forest:
        return Plan(forest, model=SHAPE, always_share=True, **options)


def compared(sequences, labels, weights, plan, mutant=""):
    """The largest error of a parameter's gradient, relative to its norm; and what was run."""
    model = Tiny()
    wanted = gradients(model, lambda: dense(model, sequences, labels, weights))
    executor = Executor(model, plan, sequences, mutant)
    got = gradients(model, executor.work)
    assert any(float(it.norm()) > 1e-3 for it in wanted if it is not None)
    errors = [
        float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True) if b is not None
    ]
    return largest(errors), executor.kinds


def positions(spans):
    return [[at for begin, end in own for at in range(begin, end)] for own in spans]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block_rows", [0, 3])
def test_a_tree_gives_the_dense_gradient(seed, block_rows):
    sequences, spans, weights = batch(seed)
    with plan_of(
        sequences, spans=spans, weights=weights, microbatch_rows=9, block_rows=block_rows
    ) as plan:
        error, _ = compared(sequences, positions(spans), weights, plan)
    assert error < TOLERANCE


def test_all_tokens_or_those_from_a_position_on():
    sequences, _, _ = batch(11)
    ones = [1.0] * len(sequences)
    with plan_of(sequences, microbatch_rows=30) as plan:
        every = [list(range(1, len(ids))) for ids in sequences]
        assert compared(sequences, every, ones, plan)[0] < TOLERANCE
    loss_from = [(len(ids) + 2) // 2 for ids in sequences]
    with plan_of(sequences, microbatch_rows=30, loss_from=loss_from) as plan:
        later = [
            list(range(first, len(ids))) for first, ids in zip(loss_from, sequences, strict=True)
        ]
        assert compared(sequences, later, ones, plan)[0] < TOLERANCE


def short_of_memory(sequences, spans, weights, **host):
    """The plan for the least device memory of a search, with no ``host`` memory to sleep in."""
    options = {"spans": spans, "weights": weights, "microbatch_rows": 4, **host}
    low, high = 1, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            plan_of(sequences, device_bytes=middle, **options).close()
            high = middle
        except ArgumentError as error:
            assert "would fit" in str(error) or "rows fit" in str(error), error
            low = middle + 1
    return plan_of(sequences, device_bytes=low, **options)


@pytest.mark.parametrize(
    ("seed", "host"),
    [(1, {"host_bytes": 1}), (2, {"machine": Machine(host_bytes=1)})],
    ids=["asked", "the machine's"],
)
def test_what_is_recomputed_gives_the_dense_gradient(seed, host):
    sequences, spans, weights = batch(seed)
    with short_of_memory(sequences, spans, weights, **host) as plan:
        assert plan.predict()["recomputed_rows"] > 0
        error, kinds = compared(sequences, positions(spans), weights, plan)
    assert error < TOLERANCE
    without_graph = [kind for kind in kinds if kind == (OpKind.PREFIX_FORWARD, True)]
    again = [kind for kind, _ in kinds if kind is OpKind.FORWARD_AGAIN]
    assert 0 < len(without_graph) == len(again)


def gradients_of_ranks(model, sequences, spans, weights, ranks):
    """Every rank's part run by its plan, in the order that all ranks have; and that order."""
    plans = []
    with Forest.from_ids(sequences, vocab=VOCAB) as forest:
        machine = Machine(flops_per_s=10**9, op_overhead_ns=1000)
        cut = shares(forest, ranks=ranks, microbatch_tokens=9, model=SHAPE, machine=machine)
        for share in cut["shares"]:
            own = share["sequences"]
            if own:
                with forest.part(own) as part:
                    plan = Plan(
                        part,
                        model=SHAPE,
                        spans=[spans[at] for at in own],
                        weights=[weights[at] for at in own],
                        microbatch_rows=9,
                        block_rows=5,
                        always_share=True,
                    )
                    plans.append((plan, [sequences[at] for at in own]))
    executors = [Executor(model, plan, own) for plan, own in plans]
    common = collective_order([plan.passes() for plan, _ in plans])

    def work():
        for executor in executors:
            executor.work()

    got = gradients(model, work)
    for executor, own in zip(executors, common["own"], strict=True):
        run = [PASS[kind] for kind, _ in executor.kinds]
        assert run == [common["kinds"][at] for at in own] and own == sorted(own)
    return got, len(plans)


PASS = {
    OpKind.PREFIX_FORWARD: "forward",
    OpKind.FORWARD_AGAIN: "forward",
    OpKind.MICROBATCH: "microbatch",
    OpKind.PREFIX_BACKWARD: "backward",
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_ranks_together_give_the_dense_gradient(ranks):
    sequences, spans, weights = batch(4)
    model = Tiny()
    wanted = gradients(model, lambda: dense(model, sequences, positions(spans), weights))
    got, busy = gradients_of_ranks(model, sequences, spans, weights, ranks)
    assert busy == ranks or ranks == 20 and 3 < busy < 20, "more ranks than leaves: some have none"
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < TOLERANCE


@pytest.mark.parametrize("mutant", ["accumulator", "score"])
def test_what_is_forgotten_shows(mutant):
    sequences, spans, weights = batch(1)
    with plan_of(sequences, spans=spans, weights=weights, microbatch_rows=9) as plan:
        error, _ = compared(sequences, positions(spans), weights, plan, mutant)
    assert error > 1e-3
