"""Shared prompts in trainers on Megatron-core: :func:`share`.

The trainer's schedule, loss, gradient reduction, clipping and optimizer stay as they are; the
per-token losses that its model returns come from shared passes. ``docs/trainers.md`` has the diff.
"""

from __future__ import annotations

from collections.abc import Callable

from ..runtime import Runtime
from ..hf.scored_model import AUTO
from ..trainers import UnsupportedTrainerError
from ..trainers.options import Options
from ..trainers.sharing import Sharing
from .batches import Microbatch, Read, read_batch
from .context_attention import ContextAttention
from .forward_backward import SharedForwardBackward

__all__ = [
    "ContextAttention",
    "Microbatch",
    "SharedForwardBackward",
    "Sharing",
    "UnsupportedTrainerError",
    "share",
]


def share(
    forward_backward_func: Callable,
    *,
    runtime: Runtime | None = None,
    read: Read = read_batch,
    sleep: bool = True,
    prompt_chunks: int | None = None,
    across_replicas: bool = False,
    microbatch_tokens: int | None = None,
    graphs: str = AUTO,
) -> SharedForwardBackward:
    """Returns what replaces Megatron's ``forward_backward_func``, with the same arguments and
    results, and computes equal prompts of its microbatches once::

        forward_backward_func = dormouse.megatron.share(get_forward_backward_func())

    Each call takes its ``num_microbatches`` batches from the data iterator and finds the rows'
    prompts: the tokens before the first label with a loss. The ``forward_step_func`` then runs as
    ever; where it calls the model with labels, it gets the losses of its own rows, ``[rows,
    columns]`` in FP32. So rows, losses, their scale and what is logged stay those of the trainer.
    Losses of labels before a row's first and after its last in the loss mask are 0, in evaluations
    too, and have no gradient: a loss reads those of the batch's own mask. The model runs forward in
    the first microbatch, and backward in the backward of the last: gradients arrive once, and
    Megatron's DistributedDataParallel and ``finalize_model_grads`` reduce them as ever. A call
    without a shared prompt runs as in Megatron, and the first one is logged.

    In a pipeline all stages run the forwards of all rows first, without a graph. The last one then
    runs ``forward_step_func`` for every microbatch, which the others do not call, and all stages
    carry out lists of the planner, forwards again and backwards. So it may change nothing around
    its call of the model, neither autocast nor the model. A stage may have several chunks of
    the model (interleaved), with lists of models and of data iterators, as Megatron takes them.

    Ranks of a context-parallel group get their parts of the same rows, as
    ``get_batch_on_this_cp_rank`` cuts them, and give each call of the model its part; losses come
    back likewise. Layers have :class:`ContextAttention`. All rows run in shared passes, also those
    that share no prompt, so a row with a loss begins with two tokens without one.

    Ranks of a model-parallel group, tensor-parallel ranks and stages, get the same batches.
    All ranks make the same calls in one order, those with ``forward_only`` too: a failure of one is
    told to all. Data-parallel ranks whose calls differ in that raise
    :class:`dormouse.ranks.RanksDifferError`; their batches and numbers of microbatches may differ.
    Passes of an expert-parallel group wait for each other, so its ranks call this with the same
    options, and prompts are shared if all of them have some, in a pipeline each as a whole.

    Routers that balance experts in training, by losses or biases, read every row of the batches. So
    padding and rows without a loss then run too, and what is logged is Megatron's.

    The first call in each state of the model runs a miniature group both ways, and raises
    :class:`dormouse.hf.UnsupportedModelError` if gradients differ. What is known not to be
    supported raises :class:`UnsupportedTrainerError`.

    ``runtime``: manages the memory that sleeps. None: on a CPU one of the process's own, with the
    settings of the environment; on a GPU pass ``dormouse.install().runtime``. ``read``: returns the
    tokens, labels and loss mask of a batch of the data iterator; the default reads the entries
    ``"tokens"``, ``"labels"`` and ``"loss_mask"``. ``sleep=False`` keeps prompts awake.
    ``prompt_chunks``: of a pipeline, the number of chunks in which stages run a prompt, fewer of
    one with fewer tokens; 1 runs it whole, None leaves the number to the planner.
    ``across_replicas``: rows of all data-parallel replicas share prompts. Tokens of all rows go to
    all replicas, and each runs the rows that the planner gives it, equal prompts on few replicas;
    log-probabilities go to the replicas that have the rows, and gradients come back. Every replica
    passes it, or a call raises :class:`dormouse.ranks.RanksDifferError` on each; ``sharing`` counts
    what this one runs.
    ``microbatch_tokens``, ``graphs``: of :meth:`dormouse.hf.SharedPrefix.score`. None: the tokens
    of the longest microbatch's responses. In a pipeline and with expert parallelism graphs are
    never kept (``"twice"``). Other values raise :class:`dormouse.ArgumentError`.

    The returned object's ``sharing`` counts what was shared: :class:`Sharing`.

    Not thread-safe: one thread at a time runs a model. Calls for it on other threads raise
    :class:`dormouse.StateError` meanwhile, of other returned objects too, before they have sent
    anything. Such a call may be made again; ranks on which it was not refused wait for it.
    """
    return SharedForwardBackward(
        forward_backward_func,
        read=read,
        prompt_chunks=prompt_chunks,
        across_replicas=across_replicas,
        options=Options(
            runtime=runtime, sleep=sleep, microbatch_tokens=microbatch_tokens, graphs=graphs
        ),
    )
