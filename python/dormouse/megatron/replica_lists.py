"""Which replica of a pipeline runs which rows, by the ends of their lists.

Rows are assigned by the times of their passes, and groups are cut where that balances replicas.
Where stages have room for few groups at a time, a list pays a bubble for each of its groups, cut
ones included. Then the planner also assigns whole groups by the ends of the lists
(docs/queries/replicas.md), and what ends sooner runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron.core import parallel_state

from .. import queries
from ..errors import ArgumentError
from ..hf.padded import Places
from .chunks import cut_of, described
from .held import gathered
from .replicas import Dealt, Replicas
from .shared_gpt import SharedGPT, largest


class _Ends(NamedTuple):
    """Of the lists of all replicas."""

    latest_ns: int
    halvings: int
    """The most of any list: 0 if rooms bound none."""
    do_not_fit: int
    """1: a list does not fit."""


class ReplicaLists:
    """What the lists of all replicas follow from. Its construction and each method are collective
    of the ranks of all models."""

    def __init__(
        self,
        shared: Sequence[SharedGPT],
        replicas: Replicas,
        prompt_chunks: int | None,
        microbatch_tokens: int,
    ):
        """``shared``: this stage's parts of the model. ``prompt_chunks``, ``microbatch_tokens``: of
        a call."""
        self._first, self._replicas = shared[0], replicas
        self._prompt_chunks, self._microbatch_tokens = prompt_chunks, microbatch_tokens
        group = parallel_state.get_pipeline_model_parallel_group()
        self._shape = {"stages": group.size(), "virtual_stages": len(shared)}
        self._figures = gathered(
            self._first.held, group.rank(), group.size(), self._largest_of_all
        )

    def sooner(self, cut: Dealt, places: list[Places], of_replicas: Sequence) -> Dealt:
        """Returns this replica's part of the rows: ``cut``, or whole groups if lists then end
        sooner. ``places``, ``of_replicas``: of :meth:`.replicas.Replicas.dealt`."""
        if not self._figures.stage_bytes or len(places) < self._replicas.group.size():
            return cut
        ends = self._ends(cut.places)
        if ends.do_not_fit or not ends.halvings:
            return cut
        runners = self._whole(places)
        if runners is None:
            return cut
        whole = self._replicas.dealt(places, of_replicas, runners)
        ends_whole = self._ends(whole.places)
        is_sooner = not ends_whole.do_not_fit and ends_whole.latest_ns < ends.latest_ns
        return whole if is_sooner else cut

    def _ends(self, own: list[Places]) -> _Ends:
        """``own``: what this replica runs."""
        found = _Ends(0, 0, 0)
        if own:
            rows = self._first.rows(own, self._microbatch_tokens)
            try:
                report = queries.pipeline(list(map(described, rows)), **self._asked(rows))["report"]
                found = _Ends(report["makespan_ns"], report["halvings"], 0)
            except ArgumentError:
                found = _Ends(0, 0, 1)
        return _Ends(*largest(self._first.gpt, found, self._replicas.group))

    def _whole(self, places: list[Places]) -> dict[int, int] | None:
        """Returns the replica that runs each row, with whole groups; None: no lists fit."""
        rows = self._first.rows(places, self._microbatch_tokens)
        try:
            answer = queries.replicas(
                list(map(described, rows)),
                replicas=self._replicas.group.size(),
                lists=False,
                **self._asked(rows),
            )
        except ArgumentError:
            return None
        return {
            row: number
            for number, replica in enumerate(answer["replicas"])
            for group in replica["groups"]
            for row in places[group].rows
        }

    def _asked(self, rows: list[list[int]]) -> dict:
        """Returns what the planner's queries have besides groups."""
        rows_min = self._first.own_rows(self._microbatch_tokens)
        return {
            **self._shape,
            **cut_of(rows, self._prompt_chunks, rows_min, **self._shape),
            "order": "stream",
            "stage_bytes": self._figures.stage_bytes,
            "stage_room_bytes": self._figures.room_bytes,
        }

    def _largest_of_all(self, numbers: list[int]) -> list[int]:
        return largest(self._first.gpt, largest(self._first.gpt, numbers), self._replicas.group)
