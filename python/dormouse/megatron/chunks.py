"""In how many chunks the stages of a pipeline run prompts.

While a stage runs a chunk, the next one runs the chunk before, so a pipeline fills and drains in
the time of a chunk. Later rows read a cut prompt in as many parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import queries

# A backward pass takes about twice as long as a forward pass.
BACKWARD_OVER_FORWARD = 2
# Of the planner.
PROMPT_CHUNKS_MAX = 1024
# Of those that are chosen.
CHUNKS_MAX = 16
# Share of all work by which each further chunk makes it longer: attention reads one more part.
PART_SHARE = 0.01


def described(rows: Sequence[int]) -> dict:
    """Returns a group as the planner's query has it. ``rows``: of its prompt and each
    microbatch."""

    def costs(count: int) -> dict:
        return {"rows": count, "forward_ns": count, "backward_ns": BACKWARD_OVER_FORWARD * count}

    prefix, *microbatches = rows
    return {
        "prefix_rows": prefix,
        "forward": {"linear_ns": prefix},
        "backward": {"linear_ns": BACKWARD_OVER_FORWARD * prefix},
        "microbatches": list(map(costs, microbatches)),
    }


def chosen(
    groups: Sequence[Sequence[int]], rows_min: int, *, stages: int, virtual_stages: int
) -> int:
    """Returns the number of chunks with which a pipeline ends first, by an estimate: the planner's
    lists of 16 numbers would take it longer than a step may. Depends on lengths alone, so that a
    call's values do.

    ``groups``: rows of the prompt and each microbatch, of each group. ``rows_min``: of a chunk.
    """
    work = virtual_stages * sum(map(sum, groups))
    longest = max(prefix for prefix, *_ in groups)
    (first, first_microbatch, *_), (last, *_, last_microbatch) = groups[0], groups[-1]

    def rows(count: int) -> float:
        """Returns the rows that a stage runs or waits for, forward and backward."""
        chunk, of_first, of_last = (
            prefix / max(1, min(count, prefix // rows_min)) for prefix in (longest, first, last)
        )
        # The first group fills the pipeline and the last one drains it; a longer prompt between
        # them holds it up as well, but less.
        fills = (max(of_first, first_microbatch) + chunk) / 2
        drains = (max(of_last, last_microbatch) + chunk) / 2
        waits = (stages - 1) * (fills + BACKWARD_OVER_FORWARD * drains)
        return (1 + BACKWARD_OVER_FORWARD) * work * (1 + PART_SHARE * (count - 1)) + waits

    return min(range(1, max(1, min(longest // rows_min, CHUNKS_MAX)) + 1), key=rows)


def cut_of(
    groups: Sequence[Sequence[int]], given: int | None, rows_min: int, **shape: int
) -> dict[str, int]:
    """Returns what the planner's query has of chunks. ``given``: their number; None: chosen.
    ``rows_min``, ``shape``: of :func:`chosen`."""
    if given is not None:
        return {"chunks": given, "chunk_rows_min": 1}
    return {"chunks": chosen(groups, rows_min, **shape), "chunk_rows_min": rows_min}


def ends_of(groups: Sequence[Sequence[int]], **cut: int) -> list[list[int]]:
    """Returns of each group the last row of each chunk, exclusive. ``cut``: ``chunks`` and
    ``chunk_rows_min`` of the planner's query."""
    # Cuts do not depend on the number of stages, and one has its list at once.
    asked = {"stages": 1, "order": "group_by_group", **cut}
    lists = queries.pipeline(list(map(described, groups)), **asked)
    found: list[list[int]] = [[] for _ in groups]
    for op in lists["stages"][0]["ops"]:
        if op["kind"] == "prefix_forward":
            found[op["group"]].append(op["rows"]["end"])
    return found
