"""The steps that test_ranks_gloo.py runs on several ranks: who brings which groups, to what model.

Read by the test, which computes the dense gradients in its own process, and by ranks_worker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import models
import torch

from dormouse import Tree
from dormouse.hf import Output

# Groups as (prompt tokens, response lengths, seed).
LONG = (12, (5, 1, 7, 3, 6), 1)
SHORT = (9, (2, 4), 2)
PLAIN = (20, (3, 3), 3)
TINY = (2, (1,), 4)
# Trees by seed, with unequal numbers of passes.
TREE, OTHER_TREE = ("tree", 1), ("tree", 4)
# Long enough that what a layer saves are blocks that can sleep.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
WIDE_GROUP = (160, (9, 4), 5)


@dataclass(frozen=True)
class Case:
    """One step, or one that must be refused."""

    shares: tuple
    """Each rank's groups and trees."""
    spread: str = "fully_shard"
    """``fully_shard``, ``ddp``, ``plain``, or a variant of the first: see ranks_worker.py."""
    microbatch_tokens: tuple[int, ...] = (8, 8, 8)
    """By rank, as are the next."""
    sleep: tuple[bool, ...] = (False, False, False)
    model: dict = field(default_factory=dict)
    """Changes of the tiny model's configuration."""
    trainable: str = ""
    """Only parameters with this in their name are trained."""
    reads: tuple[str, ...] = ()
    """What losses read: ``hidden``, ``logits``, ``prompt``; empty: logits of responses."""
    altered: str = ""
    """What is done to ranks or to the code: see ranks_worker.py."""


UNEQUAL = ((SHORT, LONG, PLAIN), (TINY,))
LONE = ((WIDE_GROUP,), (WIDE_GROUP,))
BOTH_ASLEEP = (True, True)
SMALL = {
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 12,
}

# Steps whose gradients are the dense ones.
STEPS = {
    "unequal": Case(UNEQUAL),
    "unequal the other way": Case(tuple(reversed(UNEQUAL))),
    "five microbatches against one": Case(((LONG,), (TINY,)), microbatch_tokens=(1, 1)),
    "one empty share": Case(((LONG, SHORT), ())),
    "no groups at all": Case(((), ())),
    "two steps": Case(UNEQUAL, altered="two steps"),
    "after an error of the loss": Case(UNEQUAL, altered="loss fails first"),
    "after an error within a layer": Case(UNEQUAL, altered="a layer fails first"),
    "after a forward without gradients": Case(UNEQUAL, altered="forward without gradients"),
    "after a forward without backward": Case(UNEQUAL, altered="forward without backward"),
    "gathered until the backward": Case(UNEQUAL, spread="keep gathered"),
    "only the model as a whole": Case(UNEQUAL, spread="root only"),
    "shards within layers": Case(UNEQUAL, spread="nested"),
    "decoder and head as well": Case(UNEQUAL, spread="every level"),
    "gathered in FP32": Case(UNEQUAL, spread="FP32"),
    "one layer, tied head": Case(
        UNEQUAL, model={"num_hidden_layers": 1, "tie_word_embeddings": True}
    ),
    "only the head is trained": Case(UNEQUAL, trainable="lm_head"),
    "only values of the last layer": Case(UNEQUAL, trainable="2.self_attn.v_proj"),
    "a smaller budget on one rank": Case(UNEQUAL, microbatch_tokens=(16, 5)),
    "the smaller budget on both": Case(UNEQUAL, microbatch_tokens=(5, 5)),
    "one rank sleeps": Case(((WIDE_GROUP, SHORT), (WIDE_GROUP,)), sleep=(True, False), model=WIDE),
    "both sleep, weights gathered": Case(
        LONE, spread="nested, keep gathered", sleep=BOTH_ASLEEP, model=WIDE
    ),
    "both sleep, weights gathered since the probe": Case(
        LONE, spread="nested", sleep=BOTH_ASLEEP, model=WIDE, altered="gathered in the second step"
    ),
    "checkpointed layers": Case(UNEQUAL, altered="checkpointed"),
    "reentrant checkpointed layers": Case(UNEQUAL, altered="checkpointed, reentrant"),
    "checkpointed layers, asleep": Case(
        LONE, sleep=BOTH_ASLEEP, model=WIDE, altered="checkpointed"
    ),
    "ddp, checkpointed layers": Case(UNEQUAL, spread="ddp", altered="checkpointed"),
    "ddp": Case(UNEQUAL, spread="ddp"),
    "trees": Case(((TREE, SHORT), (OTHER_TREE,))),
    "a tree on one rank alone": Case(((LONG, TINY), (TREE,))),
    "a tree, and nothing": Case(((TREE,), ())),
    "trees, shards within layers": Case(((TREE,), (OTHER_TREE, SHORT)), spread="nested"),
    "trees, asleep": Case(((TREE, WIDE_GROUP), (WIDE_GROUP,)), sleep=BOTH_ASLEEP, model=WIDE),
    "trees in the second step": Case(((TREE,), (SHORT,)), altered="two steps"),
    "trees, ddp": Case(((TREE, SHORT), (OTHER_TREE,)), spread="ddp"),
    "trees, plain": Case(((TREE,), ()), spread="plain"),
    "ddp, one empty share": Case(((LONG,), ()), spread="ddp"),
    "ddp after a step of its own": Case(UNEQUAL, spread="ddp", altered="a dense step first"),
    "plain": Case(UNEQUAL, spread="plain", microbatch_tokens=(16, 5)),
    "plain, two steps": Case(UNEQUAL, spread="plain", altered="two steps"),
    "plain, asleep": Case(
        ((WIDE_GROUP,), (SHORT,)), spread="plain", sleep=(True, False), model=WIDE
    ),
    "plain, only the head is trained": Case(((LONG,), ()), spread="plain", trainable="lm_head"),
}

# Losses that read more than the logits of responses. One without logits leaves zeros in the head.
STEPS |= {
    "hidden states": Case(UNEQUAL, reads=("logits", "hidden")),
    "hidden states alone": Case(UNEQUAL, reads=("hidden",)),
    "hidden states alone, asleep": Case(LONE, model=WIDE, sleep=BOTH_ASLEEP, reads=("hidden",)),
    "trees, hidden states": Case(((TREE, SHORT), (OTHER_TREE,)), reads=("logits", "hidden")),
    "trees, hidden states alone": Case(((TREE,), (SHORT,)), reads=("hidden",)),
    "trees, hidden states, ddp": Case(((TREE,), ()), spread="ddp", reads=("logits", "hidden")),
    "plain, loss of the prompt": Case(
        UNEQUAL, spread="plain", reads=("logits", "hidden", "prompt")
    ),
    "ddp, loss of the prompt": Case(UNEQUAL, spread="ddp", reads=("logits", "hidden", "prompt")),
}

# Steps that no rank begins.
REFUSED = {
    "other parameters are trained": Case(UNEQUAL, altered="rank 1 freezes a layer"),
    "other spread": Case(UNEQUAL, altered="rank 1 is not sharded"),
    "one rank cannot": Case(UNEQUAL, altered="rank 1 has dropout"),
    "one rank cannot, and says so at length": Case(UNEQUAL, altered="rank 1 has much dropout"),
    "one rank's groups can be read once": Case(UNEQUAL, altered="rank 1 has a generator"),
    "no dummy microbatches": Case(UNEQUAL, altered="no dummy microbatches"),
    "no dummy microbatches on one rank": Case(UNEQUAL, altered="no dummy microbatches on rank 1"),
    "backward alone": Case(UNEQUAL, altered="backward"),
    "backward alone, ddp": Case(UNEQUAL, spread="ddp", altered="backward"),
    "attention as a whole": Case(UNEQUAL, spread="attention"),
    "layers but not the model": Case(UNEQUAL, spread="layers only"),
    "a weight left out": Case(UNEQUAL, spread="without the norm"),
    "flattened": Case(UNEQUAL, spread="FSDP1"),
    "a group of one rank": Case(UNEQUAL, altered="a group of one rank"),
    "a loss of the prompt": Case(UNEQUAL, reads=("logits", "hidden", "prompt")),
    "a loss of the prompt on one rank": Case(
        UNEQUAL, spread="plain", reads=("logits", "hidden", "prompt"), altered="rank 1 reads less"
    ),
    "one rank asks for no output": Case(UNEQUAL, altered="rank 1 asks for no output"),
}

# Steps whose gradients must be seen to be wrong.
MUTANTS = {
    "weights twice": Case(UNEQUAL, altered="weights twice"),
    "dummy microbatches that count": Case(UNEQUAL, altered="dummy microbatches that count"),
}

TWO_RANKS = STEPS | REFUSED | MUTANTS

THREE_RANKS = {
    "two groups, one, none": Case(((SHORT, LONG), (TINY,), ())),
    "ddp of three": Case(((SHORT,), (), (TINY,)), spread="ddp"),
    "a rank stays away": Case(((SHORT,), (SHORT,), (SHORT,)), altered="rank 2 stays away"),
    # The last: what comes after it has no third rank.
    "a rank dies": Case(((SHORT,), (SHORT,), (SHORT,)), altered="rank 2 dies"),
}


def model_of(case: Case) -> torch.nn.Module:
    """The same model on every rank and in the test's own process."""
    model = models.tiny(**(SMALL | case.model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.trainable in name)
    return model


def groups_of(case: Case, rank: int) -> list:
    return [_batch(*entry) for entry in case.shares[rank]]


def _batch(prompt, *more):
    if prompt == "tree":
        return Tree(models.conversations(*more))
    lengths, seed = more
    return models.group(prompt, lengths, seed=seed)


def loss_of(rank: int, reads: tuple[str, ...] = ()) -> Callable:
    """Differs by rank, group and response, so that mixing them up is seen."""

    def loss(given, labels, i, *others):
        *positions, g = others
        if positions and reads:
            total = given.last_hidden_state.tanh().mean(-1) * (i + 1)
            if "logits" in reads:
                total = total + models.token_losses(given.logits, labels, i, *positions)
        elif positions:
            total = models.token_losses(given, labels, i, *positions)
        elif not reads:
            total = models.loss_fn(given, labels, i)
        else:
            total = given.last_hidden_state.tanh().mean() * (i + 1)
            if "logits" in reads:
                total = total + models.loss_fn(given.logits, labels, i)
            if "prompt" in reads:
                total = total + given.prompt.last_hidden_state.tanh().sum() * 0.1
        return total * (1 + 0.2 * g + 0.5 * rank)

    return loss


def prompt_loss_of(rank: int) -> Callable:
    def loss(output, labels, g):
        return models.loss_fn(output.logits, labels, g) * (1 + 0.5 * rank)

    return loss


def dense_backward(case: Case, model, rank: int) -> None:
    """The ordinary way, for every group of a rank."""
    for g, group in enumerate(groups_of(case, rank)):
        loss = _partial(loss_of(rank, case.reads), g)
        if isinstance(group, Tree) and case.reads:
            _tree_backward(model, group.conversations, loss)
            continue
        if isinstance(group, Tree):
            models.dense_tree_backward(model, group.conversations, loss)
            continue
        if not case.reads:
            models.dense_backward(model, group, loss)
            continue
        first = len(group.prompt) - 1
        for i, response in enumerate(group.responses):
            tokens = torch.cat([group.prompt, response[:-1]]).unsqueeze(0)
            output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            logits, hidden = output.logits[0], output.hidden_states[-1][0]
            prompt = Output(logits[:first], hidden[:first])
            own = Output(logits[first:], hidden[first:], prompt=prompt)
            total = group.weights[i] * loss(own, response, i) + 0.0 * logits.sum()
            if "prompt" in case.reads and i == 0:
                total = total + prompt_loss_of(rank)(prompt, group.prompt[1:], g)
            total.backward()


def _tree_backward(model, conversations, loss) -> None:
    """Of losses that read hidden states."""
    for i, each in enumerate(conversations):
        if each.used_tokens == 0:
            continue
        output = model(each.tokens[None], use_cache=False, output_hidden_states=True)
        logits, hidden = output.logits[0], output.hidden_states[-1][0]
        total = 0.0 * logits.sum()
        for begin, end in each.labels:
            rows = slice(begin - 1, end - 1)
            own = Output(logits[rows], hidden[rows])
            total = total + loss(own, each.tokens[begin:end], i, range(begin, end)).sum()
        (each.weight * total).backward()


def dense_gradients(case: Case) -> dict[str, torch.Tensor]:
    """The mean over ranks of what a dense loop over each rank's groups gives."""
    model = model_of(case)
    for rank in range(len(case.shares)):
        dense_backward(case, model, rank)
    gradients = models.take_gradients(model)
    return {name: gradient / len(case.shares) for name, gradient in gradients.items()}


def _partial(loss: Callable, g: int) -> Callable:
    return lambda *arguments: loss(*arguments, g)
