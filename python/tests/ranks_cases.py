"""The steps that test_ranks_gloo.py runs on several ranks: who brings which groups, to what model.

Read by the test, which computes the dense gradients in its own process, and by ranks_worker.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import models
import torch
from model_zoo import in_fp64, zoo_model

from dormouse import Conversation, Group, Tree
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
    exchange: bool = False
    kind: str = ""
    """A model of model_zoo.py instead of the tiny one."""
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
    "a group without weights": Case(((LONG,), (("weightless",),))),
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

# Prompts that ranks share: the same seed, or a beginning of it.
COMMON = {"exchange": True}
SAME, SAME_LONG = (12, (2, 4), 7), (30, (3, 1, 2), 7)
BRANCH, OTHER_BRANCH = ("branch", 0), ("branch", 1)
LABELLED, LABELLED_TOO = ("labelled", 0), ("labelled", 1)

EXCHANGES = {
    "the same prompt": Case(((SAME,), (SAME,)), spread="ddp", **COMMON),
    "a prompt that begins another": Case(((SAME, LONG), (SAME_LONG,)), spread="plain", **COMMON),
    "several groups of a prompt": Case(((SAME, SAME), (SAME_LONG, SAME)), spread="ddp", **COMMON),
    "branches of a tree": Case(((BRANCH, TINY), (OTHER_BRANCH,)), spread="ddp", **COMMON),
    "a tree and a group": Case(((BRANCH,), (("stem",),)), spread="plain", **COMMON),
    "labels on what is shared": Case(((LABELLED,), (LABELLED_TOO,)), spread="ddp", **COMMON),
    "nothing in common": Case(((LONG,), (TINY,)), spread="ddp", **COMMON),
    "an exchange with nobody": Case(((SAME,), ()), spread="ddp", **COMMON),
    "an exchange, asleep": Case(
        ((WIDE_GROUP,), (WIDE_GROUP, SHORT)), spread="ddp", sleep=BOTH_ASLEEP, model=WIDE, **COMMON
    ),
    "an exchange that stays awake": Case(
        ((WIDE_GROUP,), (WIDE_GROUP,)), spread="ddp", sleep=BOTH_ASLEEP, model=WIDE,
        altered="layers stay awake", **COMMON,
    ),
    "an exchange of shards": Case(((BRANCH, SAME), (OTHER_BRANCH, SAME_LONG)), **COMMON),
    "an exchange of shards, one empty": Case(((SAME,), ()), **COMMON),
    "an exchange of adapters": Case(
        ((SAME,), (SAME,)), spread="ddp", trainable="2.self_attn", **COMMON
    ),
    "recurrent layers": Case(
        ((BRANCH, SAME), (OTHER_BRANCH, SAME_LONG)), spread="ddp", kind="qwen3_next", **COMMON
    ),
    "convolutions": Case(
        ((BRANCH, SAME), (OTHER_BRANCH, SAME_LONG)), spread="ddp", kind="lfm2", **COMMON
    ),
    "scans": Case(((BRANCH,), (OTHER_BRANCH,)), spread="plain", kind="mamba2", **COMMON),
    "keys that select others": Case(
        ((BRANCH, SAME), (OTHER_BRANCH, SAME_LONG)), spread="ddp", kind="deepseek_v32", **COMMON
    ),
    "two exchanges": Case(
        ((BRANCH,), (OTHER_BRANCH,)), spread="ddp", altered="two steps", **COMMON
    ),
    "an exchange after an error of the loss": Case(
        ((BRANCH,), (OTHER_BRANCH,)), spread="ddp", altered="loss fails first", **COMMON
    ),
}
FAILURES = {
    f"{where} of rank {rank} fails": Case(
        ((SAME, BRANCH), (SAME, OTHER_BRANCH)), spread="ddp", altered=f"{where} {rank} fails",
        **COMMON,
    )
    for where in ("loss", "forward", "backward", "layout")
    for rank in (0, 1)
}

# Steps whose gradients must be seen to be wrong.
MUTANTS = {
    "weights twice": Case(UNEQUAL, altered="weights twice"),
    "dummy microbatches that count": Case(UNEQUAL, altered="dummy microbatches that count"),
}

EXCHANGE_MUTANTS = {
    "gradients that are not sent back": Case(
        ((BRANCH,), (OTHER_BRANCH,)), spread="ddp", altered="sends zeros", **COMMON
    ),
}

TWO_RANKS = STEPS | REFUSED | MUTANTS
EXCHANGE_TWO = EXCHANGES | FAILURES | EXCHANGE_MUTANTS

THREE_RANKS = {
    "two groups, one, none": Case(((SHORT, LONG), (TINY,), ())),
    "ddp of three": Case(((SHORT,), (), (TINY,)), spread="ddp"),
    "a rank stays away": Case(((SHORT,), (SHORT,), (SHORT,)), altered="rank 2 stays away"),
    # The last: what comes after it has no third rank.
    "a rank dies": Case(((SHORT,), (SHORT,), (SHORT,)), altered="rank 2 dies"),
}


def model_of(case: Case) -> torch.nn.Module:
    """The same model on every rank and in the test's own process."""
    model = models.tiny(**(SMALL | case.model)) if not case.kind else zoo_model(case.kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(case.trainable in name)
    return model


EXCHANGE_THREE = {
    "prompts of three ranks": Case(((SAME, BRANCH), (SAME_LONG,), (OTHER_BRANCH, SAME)), **COMMON),
    "one rank without any": Case(
        ((BRANCH, LONG), (), (OTHER_BRANCH, SHORT)), spread="ddp", **COMMON
    ),
    "two owners, each waiting": Case(
        ((SAME, BRANCH), (BRANCH, SAME_LONG), (OTHER_BRANCH, SAME)), spread="ddp", **COMMON
    ),
    "rank 1 differs": Case(
        ((SAME,), (SAME,), (SAME,)), spread="ddp", altered="rank 1 exchanges nothing", **COMMON
    ),
    "a rank dies in an exchange": Case(
        ((SAME,), (SAME,), (SAME,)), spread="ddp", altered="rank 2 dies", **COMMON
    ),
}


DYING = {
    f"a rank dies in its {where}": Case(
        ((SAME, BRANCH), (OTHER_BRANCH, SAME)), spread="ddp", altered=f"rank 1 dies in {where}",
        **COMMON,
    )
    for where in ("forward", "loss", "backward")
}
DIES_IN_FORWARD, DIES_IN_LOSS, DIES_IN_BACKWARD = ({name: case} for name, case in DYING.items())


def groups_of(case: Case, rank: int) -> list:
    return [_batch(*entry) for entry in case.shares[rank]]


def _branches(rank: int, first_label: int) -> Tree:
    """Conversations with a beginning for all ranks, and one for each pair of branches."""
    generator = torch.Generator().manual_seed(11)
    stem, *branches = (
        torch.randint(0, models.VOCAB, (n,), generator=generator) for n in (10, 7, 6, 8)
    )
    found = []
    for i, branch in enumerate((branches[0], branches[1 + rank], branches[0])):
        own = torch.randint(0, models.VOCAB, (3 + i + rank,), generator=generator)
        tokens = torch.cat([stem, branch, (own + rank) % models.VOCAB])
        first = first_label if i != 2 else len(tokens) - 1
        found.append(Conversation(tokens, [(first, len(tokens))], 0.5 + 0.4 * i - rank))
    return Tree(found)


def _batch(prompt, *more):
    if prompt == "branch":
        return _branches(*more, first_label=15)
    if prompt == "labelled":
        return _branches(*more, first_label=6)
    if prompt == "stem":
        tree = _branches(0, first_label=15)
        return Group(tree.conversations[0].tokens[:12], [[1, 2], [3]], [0.5, -1.0])
    if prompt == "weightless":
        return models.group(14, (3, 5), weights=[0.0, 0.0])
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
    with in_fp64() if case.kind else contextlib.nullcontext():
        return _dense_gradients(case)


def _dense_gradients(case: Case) -> dict[str, torch.Tensor]:
    model = model_of(case)
    for rank in range(len(case.shares)):
        dense_backward(case, model, rank)
    gradients = models.take_gradients(model)
    return {name: gradient / len(case.shares) for name, gradient in gradients.items()}


def _partial(loss: Callable, g: int) -> Callable:
    return lambda *arguments: loss(*arguments, g)
