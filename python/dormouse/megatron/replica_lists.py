"""Which replica of a pipeline runs which rows, by the ends of their lists.

Groups are cut where that balances the work of replicas. A cut group runs its prompt on several
replicas, and pays its bubble on each. Where stages have room for few groups at a time, the lists of
whole groups may end sooner, though their work is less even. So each replica plans its list for
both, and all run what ends sooner.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from megatron.core import parallel_state

from .. import queries
from ..errors import ArgumentError
from ..hf.padded import Places
from .chunks import cut_of, described
from .held import gathered
from .replicas import Dealt
from .shared_gpt import SharedGPT, largest

# Of a list that does not fit: after all that do.
NEVER_NS = 1 << 62


def sooner(
    shared: Sequence[SharedGPT],
    dealt: Sequence[Dealt],
    prompt_chunks: int | None,
    microbatch_tokens: int,
) -> Dealt:
    """Returns that of ``dealt`` with which the replica that ends last ends sooner; of equals the
    first. Collective of the ranks of all models.

    ``shared``: this stage's parts of the model. ``prompt_chunks``, ``microbatch_tokens``: of a
    call. What stages hold is known from the call before; in the first, lists are not bounded.
    """
    first = shared[0]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages = {"stages": group.size(), "virtual_stages": len(shared)}
    of_model = functools.partial(largest, first.gpt)
    figures = gathered(first.held, group.rank(), group.size(), of_model)
    room = {"stage_bytes": figures.stage_bytes, "stage_room_bytes": figures.room_bytes}

    def end_ns(places: list[Places]) -> int:
        if not places:
            return 0
        rows = first.rows(places, microbatch_tokens)
        cut = cut_of(rows, prompt_chunks, first.own_rows(microbatch_tokens), **stages)
        try:
            answer = queries.pipeline(
                list(map(described, rows)), order="stream", **stages, **cut, **room
            )
        except ArgumentError:
            return NEVER_NS
        return answer["report"]["makespan_ns"]

    ends = of_model([end_ns(each.places) for each in dealt])
    # All ranks of all models have the same numbers, so they choose the same.
    ends = largest(first.gpt, ends, dealt[0].group)
    return min(zip(ends, dealt, strict=True), key=lambda pair: pair[0])[1]
