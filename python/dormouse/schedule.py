"""Planning: shared prefixes of sequences, the order of operations, and their cost.

- :class:`Forest`: the prefix trees of a batch, from token ids or counted lengths.
- :class:`Plan`: plans a forest, or a group (:meth:`Plan.of_group`); iterating it yields each
  :class:`Op` in turn.
- :func:`query` and its helpers: shares of ranks, pipeline stages, layouts, context shards, experts,
  rollouts, fitted rates (docs/queries/).

No function here needs a runtime.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from . import _native as native
from . import runtime
from ._native import ModelShape
from .group import Group
from .queries import (
    Machine,
    query,
    collective_order,
    context,
    experts,
    fit,
    layout,
    pipeline,
    rates,
    rollout_assign,
    rollout_migrate,
    shares,
)
from .runtime import _Handle, _text
from .token_ids import id_tensor, ids_of

__all__ = [
    "Ending",
    "Forest",
    "ForestNode",
    "Machine",
    "Member",
    "ModelShape",
    "Op",
    "Plan",
    "PlanNode",
    "Score",
    "query",
    "collective_order",
    "context",
    "experts",
    "fit",
    "layout",
    "pipeline",
    "rates",
    "rollout_assign",
    "rollout_migrate",
    "shares",
]


# Kinds of ops for the collective order.
_PASSES = {
    "prefix_forward": "forward",
    "forward_again": "forward",
    "microbatch": "microbatch",
    "prefix_backward": "backward",
}


@dataclass(frozen=True)
class ForestNode:
    """Consecutive positions ``tokens`` that the same sequences share; ``parent`` is None for a
    root."""

    parent: int | None
    tokens: range
    subtree_end: int
    sequence: int


@dataclass(frozen=True)
class Ending:
    """The end of a sequence of ``tokens`` tokens in ``node``."""

    node: int
    tokens: int


@dataclass(frozen=True)
class PlanNode:
    """A node of a plan: runs the positions ``rows`` of ``sequence`` and reads its ancestors."""

    parent: int | None
    rows: range
    subtree_end: int
    sequence: int
    origin: int
    residency: str


@dataclass(frozen=True)
class Member:
    """A leaf in a microbatch: its rows, and the position of the first."""

    sequence: int
    node: int
    rows: range
    first_position: int
    weight: float


@dataclass(frozen=True)
class Score:
    """Labels of an op: row ``rows[k]`` predicts token ``first_label + k`` of ``sequence``."""

    sequence: int
    rows: range
    first_label: int
    weight: float


@dataclass(frozen=True)
class Op:
    """One operation of a plan. ``dormouse_op_t`` documents the fields.

    ``node``, ``reads``, ``asleep`` and ``waking`` are None if there is no node. ``tokens``:
    positions that the node runs. ``scores``: rows that carry loss.
    """

    id: int
    kind: native.OpKind
    node: int | None
    tokens: range
    members: tuple[Member, ...]
    scores: tuple[Score, ...]
    is_last: bool
    without_graph: bool
    residency: str
    reads: int | None
    asleep: int | None
    waking: int | None
    wake_window_layers: int
    device_bytes: int
    host_bytes: int


class Forest(_Handle):
    """The prefix trees of a batch. Not thread-safe."""

    _destroy = "forest_destroy"

    @classmethod
    def from_ids(
        cls,
        ids,
        offsets: Sequence[int] | torch.Tensor | None = None,
        *,
        vocab: int,
        kinds: Sequence[int] | None = None,
        grow: bool = False,
    ) -> Forest:
        """Creates a forest from token ids.

        ``ids``: with ``offsets``, a tensor or array of all ids; sequence i is
        ``ids[offsets[i]:offsets[i + 1]]``. Contiguous int32 or int64 memory is read in place.
        Without ``offsets``, a list of sequences, which are concatenated.

        ``kinds``: a number for each sequence; sequences of different kinds share nothing. ``grow``
        keeps a copy of every tree token for :meth:`add`; the list may then be empty.
        """
        if offsets is None:
            sequences = [id_tensor(sequence) for sequence in ids]
            lengths = torch.tensor([0] + [len(sequence) for sequence in sequences], device="cpu")
            offsets = torch.cumsum(lengths, 0)
            ids = torch.cat(sequences) if sequences else torch.empty(0, dtype=torch.int64, device="cpu")
        pointer, id_bytes, count, kept_ids = ids_of(ids)
        kept_offsets, kept_kinds = _u64("offsets", offsets), _u64("kinds", kinds)
        # The library checks that offsets ascend, and reads up to the last one.
        if len(kept_offsets) and kept_offsets[-1] > count:
            raise _refused(f"offsets end at {kept_offsets[-1]}; accepted: at most {count}, the ids")
        struct = native.Sequences(
            ids=pointer,
            id_bytes=id_bytes,
            offsets=_address(kept_offsets),
            kinds=_address(kept_kinds),
            sequence_count=max(len(kept_offsets) - 1, 0),
            vocab=vocab,
            flags=native.SEQUENCES_GROW if grow else 0,
        )
        _same_length("kinds", kept_kinds, struct.sequence_count)
        forest = cls._create(struct)
        # The struct borrows these until the call returns.
        del kept_ids, kept_offsets, kept_kinds
        return forest

    @classmethod
    def from_nodes(
        cls,
        parents: Sequence[int | None],
        lengths: Sequence[int],
        endings: Sequence[Ending] | None = None,
    ) -> Forest:
        """Creates a forest from node lengths in depth-first order. Without ``endings`` one sequence
        ends in each leaf, in order."""
        none = native.NODE_NONE
        numbers = [none if parent is None else parent for parent in parents]
        kept_parents = native.array_of(ctypes.c_uint32, "parents", numbers)
        kept_lengths = _u64("lengths", lengths)
        _same_length("lengths", kept_lengths, len(numbers))
        kept_endings = None
        if endings is not None:
            pairs = [native.Ending(node=it.node, tokens=it.tokens) for it in endings]
            kept_endings = (native.Ending * len(pairs))(*pairs)
        return cls._create(
            native.Sequences(
                parents=_address(kept_parents),
                lengths=_address(kept_lengths),
                endings=_address(kept_endings),
                sequence_count=0 if endings is None else len(endings),
                node_count=len(numbers),
            )
        )

    @classmethod
    def _create(cls, struct: native.Sequences) -> Forest:
        forest = cls.__new__(cls)
        native.create(forest, "forest_create", ctypes.byref(struct))
        return forest

    def add(self, ids, kind: int = 0) -> int:
        """Adds a sequence to a forest created with ``grow``; returns its number."""
        pointer, id_bytes, count, kept = ids_of(ids)
        _u64("kind", [kind])
        number = ctypes.c_uint32()
        arguments = (pointer, id_bytes, count, kind, ctypes.byref(number))
        native.call("forest_add", self._handle, *arguments)
        del kept
        return number.value

    def info(self) -> dict:
        """Returns the numbers of sequences, nodes, roots, leaves, tree and dense tokens, and their
        ratio."""
        info = self._read()
        return {name: getattr(info, name) for name in runtime._plain(native.ForestInfo)}

    def _read(self, nodes=None, endings=None) -> native.ForestInfo:
        """Returns the counts of the forest; fills the given arrays."""
        info = native.ForestInfo()
        room = (nodes, len(nodes or ()), endings, len(endings or ()))
        native.call("forest_get_info", self._handle, ctypes.byref(info), *room)
        return info

    def nodes(self) -> list[ForestNode]:
        """Returns all nodes, by number."""
        array = (native.ForestNode * self._read().nodes)()
        self._read(nodes=array)
        return [
            ForestNode(
                _node(it.parent), range(it.token_begin, it.token_end), it.subtree_end, it.sequence
            )
            for it in array
        ]

    def endings(self) -> list[Ending]:
        """Returns the end of each sequence, by number."""
        array = (native.Ending * self._read().sequences)()
        self._read(endings=array)
        return [Ending(it.node, it.tokens) for it in array]

    def part(self, sequences: Sequence[int]) -> Forest:
        """Returns the forest of some sequences, for example those of a rank: its sequence i is
        ``sequences[i]``. Nodes are cut as in the whole forest, so that ops of ranks match."""
        found = query("part", forest=self, sequences=list(sequences))["forest"]
        endings = [Ending(**ending) for ending in found["endings"]]
        return Forest.from_nodes(found["parents"], found["lengths"], endings)

    def to_json(self) -> str:
        """Returns the forest as an argument of :func:`query`."""
        return _text("forest_get_json", self._handle)


# Fields of a prediction that need the machine's rates.
_UNKNOWN_IF_NEGATIVE = (
    "seconds_dense",
    "seconds_shared",
    "sleep_stall_s",
    "wake_stall_s",
    "residency_gap",
)


def predict_nothing() -> dict:
    """Returns the prediction (:meth:`Plan.predict`) for sequences of which no token carries loss,
    which have no plan: nothing runs."""
    return _described(
        native.Prediction(speedup=1.0, token_ratio=1.0, reason=b"no token carries loss")
    )


def _described(prediction: native.Prediction) -> dict:
    result = {name: getattr(prediction, name) for name in runtime._plain(native.Prediction)}
    for name in ("peak_bytes", "device_bytes", "host_bytes"):
        result[name] = list(getattr(prediction, name))
    for name in _UNKNOWN_IF_NEGATIVE:
        result[name] = None if result[name] < 0 else result[name]
    result["pays"] = bool(prediction.pays)
    result["reason"] = prediction.text("reason")
    return result


class Plan(_Handle):
    """The operations for the sequences of a forest, in order. Not thread-safe.

    Every token of a sequence but the first carries loss, or those from ``loss_from[i]`` on, or
    those in ``spans[i]`` (half-open ranges of positions). ``weights`` default to 1.
    ``dormouse_plan_options_t`` documents the other options; 0 selects the default.
    """

    _destroy = "plan_destroy"

    def __init__(
        self,
        forest: Forest,
        *,
        model: native.ModelShape,
        machine: Machine | None = None,
        loss_from: Sequence[int] | None = None,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        weights: Sequence[float] | None = None,
        microbatch_rows: int = 0,
        block_rows: int = 0,
        wake_window_layers: int = 0,
        device_bytes: int = 0,
        host_bytes: int = 0,
        last_layer_dead: bool = False,
        always_share: bool = False,
        runtime_residency: bool = False,
    ):
        count = forest.info()["sequences"]
        flags = {
            native.PLAN_LAST_LAYER_DEAD: last_layer_dead,
            native.PLAN_ALWAYS_SHARE: always_share,
            native.PLAN_RUNTIME_RESIDENCY: runtime_residency,
        }
        struct = native.PlanOptions(
            sequence_count=count,
            vocab=model.vocab,
            microbatch_rows=microbatch_rows,
            block_rows=block_rows,
            wake_window_layers=wake_window_layers,
            flags=sum(flag for flag, is_set in flags.items() if is_set),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )
        # The struct borrows these until the call returns: keep references.
        model_struct = native.Model(**{k: v for k, v in vars(model).items() if k != "vocab"})
        struct.model = ctypes.pointer(model_struct)
        if machine is not None:
            machine_struct = native.Machine(**vars(machine))
            struct.machine = ctypes.pointer(machine_struct)
        kept_from, kept_weights = _u64("loss_from", loss_from), None
        if weights is not None:
            kept_weights = (ctypes.c_double * len(weights))(*weights)
        _same_length("loss_from", kept_from, count)
        _same_length("weights", kept_weights, count)
        struct.loss_from, struct.weights = _address(kept_from), _address(kept_weights)
        if spans is not None:
            # Each pair of numbers is a span.
            bounds = [bound for own in spans for begin, end in own for bound in (begin, end)]
            kept_spans = _u64("spans", bounds)
            kept_ends = _u64("spans", list(itertools.accumulate(map(len, spans), initial=0)))
            _same_length("spans", spans, count)
            struct.spans, struct.span_offsets = _address(kept_spans), _address(kept_ends)
        native.create(self, "plan_create", forest._handle, ctypes.byref(struct))

    @classmethod
    def of_group(
        cls,
        group: Group,
        *,
        microbatch_rows: int,
        model: native.ModelShape,
        last_layer_dead: bool = True,
        cuts: Sequence[int] = (),
        **options,
    ) -> Plan:
        """Creates the plan of a flat group; the runtime decides what sleeps. ``cuts``: numbers of
        prompt tokens after which a node ends.

        Labels are the tokens of the responses. ``options`` are those of :class:`Plan`.
        """
        for name, ids in (("prompt", group.prompt), *group.named_responses()):
            outside = (ids < 0) | (ids >= model.vocab)
            if outside.any():
                at = int(outside.nonzero()[0, 0])
                accepted = f"accepted: 0 to {model.vocab - 1}"
                raise _refused(f"{name} has token id {int(ids[at])} at {at}; {accepted}")
        prompt, count = len(group.prompt), len(group.responses)
        edges = [0, *sorted(set(cuts) - {prompt}), prompt]
        prompts = [end - begin for begin, end in itertools.pairwise(edges)]
        parents = [None, *range(len(prompts) - 1), *[len(prompts) - 1] * count]
        lengths = [*prompts, *map(len, group.responses)]
        with Forest.from_nodes(parents, lengths) as forest:
            return cls(
                forest,
                model=model,
                loss_from=[prompt] * count,
                weights=group.weights,
                microbatch_rows=microbatch_rows,
                last_layer_dead=last_layer_dead,
                always_share=True,
                runtime_residency=True,
                **options,
            )

    @classmethod
    def _load(cls, text: str) -> Plan:
        """Creates the plan of a plan file (:class:`dormouse.RankPlan`)."""
        plan = cls.__new__(cls)
        native.create(plan, "plan_load", text.encode())
        return plan

    def __iter__(self) -> Iterator[Op]:
        """Yields each op in turn; requesting the next one completes it."""
        op = native.Op()
        while True:
            native.call("plan_get_op", self._handle, ctypes.byref(op))
            if op.kind == native.OpKind.DONE:
                return
            yield _op(op)
            native.call("plan_complete_op", self._handle, op.id)

    def predict(self) -> dict:
        """Returns FLOPs, ``speedup``, ``token_ratio``, seconds, bytes and the verdict.

        Figures that need unknown rates of the machine are None.
        """
        prediction = native.Prediction()
        native.call("plan_predict", self._handle, ctypes.byref(prediction))
        return _described(prediction)

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return _text("plan_get_json", self._handle)

    def passes(self) -> list[str]:
        """Returns the kind of each op where passes contain collectives: ``forward``, ``microbatch``
        or ``backward``. Input of :func:`collective_order`."""
        ops = json.loads(self.to_json())["ops"]
        return [_PASSES[op["kind"]] for op in ops if op["kind"] != "done"]

    def nodes(self) -> list[PlanNode]:
        """Returns the nodes of the plan, by number."""
        array = _array("plan_get_nodes", self._handle, native.PlanNode)
        return [
            PlanNode(
                _node(it.parent),
                range(it.row_begin, it.row_end),
                it.subtree_end,
                it.sequence,
                it.origin,
                native.RESIDENCIES[it.residency],
            )
            for it in array
        ]


def _op(op: native.Op) -> Op:
    members = tuple(
        Member(it.sequence, it.node, range(it.row_begin, it.row_end), it.first_position, it.weight)
        for it in op.members[: op.member_count]
    )
    scores = tuple(
        Score(it.sequence, range(it.row_begin, it.row_end), it.first_label, it.weight)
        for it in op.scores[: op.score_count]
    )
    return Op(
        id=op.id,
        kind=native.OpKind(op.kind),
        node=_node(op.node),
        tokens=range(op.token_begin, op.token_end),
        members=members,
        scores=scores,
        is_last=bool(op.last),
        without_graph=bool(op.flags & native.OP_WITHOUT_GRAPH),
        residency=native.RESIDENCIES[op.residency],
        reads=_node(op.reads),
        asleep=_node(op.asleep),
        waking=_node(op.waking),
        wake_window_layers=op.wake_window_layers,
        device_bytes=op.device_bytes,
        host_bytes=op.host_bytes,
    )


def _node(number: int) -> int | None:
    return None if number == native.NODE_NONE else number


def _u64(name: str, values: Sequence[int] | torch.Tensor | None) -> ctypes.Array | None:
    return None if values is None else native.array_of(ctypes.c_uint64, name, values)


def _address(array: ctypes.Array | None) -> int | None:
    return None if array is None else ctypes.addressof(array)


def _same_length(name: str, values: Sequence | None, count: int) -> None:
    """Checks the number of values, which the library relies on."""
    if values is not None and len(values) != count:
        raise _refused(f"{name} has {len(values)} values; accepted: {count}")


def _refused(sentence: str) -> Exception:
    return native.from_status(native.ERR_ARGUMENT, sentence)


def _array(function: str, handle: ctypes.c_void_p, struct: type) -> ctypes.Array:
    """Returns the array that a function of the library provides for a handle."""
    needed = ctypes.c_uint64()
    native.call(function, handle, None, 0, ctypes.byref(needed))
    array = (struct * needed.value)()
    native.call(function, handle, array, len(array), ctypes.byref(needed))
    return array
