"""Forests, plans of batches and requests: what goes in comes out, what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from models import group

from dormouse import ArgumentError, Forest, ModelShape, Plan, StateError, queries, query
from dormouse import schedule as planning
from dormouse._native import OpKind
from dormouse.schedule import Ending, Machine
from dormouse.token_ids import ids_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "queries"
SEQUENCES = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [1, 2, 3, 4], [9, 8]]
SHAPE = ModelShape(
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocab=100,
    dtype_bytes=4,
    layer_linear_weights=100,
    kv_linear_weights=20,
    last_layer_prefix_weights=25,
    head_weights=50,
    saved_bytes_per_token_layer=16,
)


def offsets():
    return [0, *np.cumsum([len(ids) for ids in SEQUENCES]).tolist()]


def flat():
    return [token for ids in SEQUENCES for token in ids]


def test_a_forest_has_its_nodes_and_endings():
    with Forest.from_ids(SEQUENCES, vocab=100) as forest:
        assert forest.info() == {
            "sequences": 5,
            "nodes": 4,
            "roots": 2,
            "leaves": 3,
            "tree_tokens": 8,
            "dense_tokens": 17,
            "compression": 17 / 8,
        }
        nodes = forest.nodes()
        assert [node.parent for node in nodes] == [None, 0, 0, None]
        assert [node.tokens for node in nodes] == [range(3), range(3, 4), range(3, 5), range(2)]
        assert [node.subtree_end for node in nodes] == [3, 2, 3, 4]
        assert [node.sequence for node in nodes] == [0, 0, 1, 4]
        ends = [Ending(1, 4), Ending(2, 5), Ending(0, 2), Ending(1, 4), Ending(3, 2)]
        assert forest.endings() == ends


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(flat()),
        torch.tensor(flat(), dtype=torch.int32),
        np.array(flat()),
        np.array(flat(), dtype=np.int32),
    ],
    ids=["torch int64", "torch int32", "numpy int64", "numpy int32"],
)
def test_ids_in_memory_are_read_where_they_lie(ids):
    pointer = ids.data_ptr() if isinstance(ids, torch.Tensor) else ids.ctypes.data
    assert ids_of(ids)[0] == pointer
    packed = Forest.from_ids(ids, offsets(), vocab=100)
    with packed as forest, Forest.from_ids(SEQUENCES, vocab=100) as listed:
        assert forest.nodes() == listed.nodes()
        assert forest.endings() == listed.endings()


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor(flat()).repeat_interleave(2)[::2],
        np.repeat(np.array(flat()), 2)[::2],
        np.array(flat(), dtype=np.int16),
        torch.tensor(flat(), dtype=torch.uint8),
        flat(),
    ],
    ids=["torch strided", "numpy strided", "int16", "uint8", "list"],
)
def test_other_ids_are_copied(ids):
    with Forest.from_ids(ids, offsets(), vocab=100) as forest:
        assert forest.info()["tree_tokens"] == 8


def test_ids_that_are_none_are_refused():
    with pytest.raises(TypeError, match="float32"):
        Forest.from_ids([torch.ones(3)], vocab=100)
    with pytest.raises(TypeError, match="2 dimensions"):
        Forest.from_ids(np.ones((2, 2), dtype=np.int64), [0, 4], vocab=100)
    with pytest.raises(ArgumentError, match="token id 9 at 0; accepted: 0 to 8"):
        Forest.from_ids(SEQUENCES, vocab=9)
    with pytest.raises(ArgumentError, match="offsets falls from 4 to 3"):
        Forest.from_ids(flat(), [0, 4, 3, 17], vocab=100)
    with pytest.raises(ArgumentError, match="kinds has 1 values; accepted: 5"):
        Forest.from_ids(SEQUENCES, vocab=100, kinds=[0])
    with pytest.raises(ArgumentError, match="sequences is 0"):
        Forest.from_ids([], vocab=100)


@pytest.mark.parametrize("ids", [flat(), np.array(flat()), torch.tensor(flat())[:16]])
def test_nothing_behind_the_ids_is_read(ids):
    ends = [*offsets()[:-1], len(ids) + 1]
    sentence = f"offsets end at {len(ids) + 1}; accepted: at most {len(ids)}, the ids"
    with pytest.raises(ArgumentError, match=sentence):
        Forest.from_ids(ids, ends, vocab=100)
    # Ids before the first offset and after the last belong to nobody.
    with Forest.from_ids(ids, [4, 9], vocab=100) as forest:
        assert forest.info()["dense_tokens"] == 5


WIDE, NARROW = 2**64, 2**32


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda f: f.add([1], kind=WIDE), f"kind has {WIDE} at 0; accepted: 0 to {WIDE - 1}"),
        (lambda f: f.add([1], kind=-1), "kind has -1 at 0"),
        (lambda f: Forest.from_ids([[1], [2]], vocab=9, kinds=[0, WIDE]), f"kinds has {WIDE} at 1"),
        (
            lambda f: Forest.from_ids([[1]], vocab=NARROW + 9),
            f"vocab is {NARROW + 9}; accepted: 0 to",
        ),
        (lambda f: Forest.from_ids([1], [0, WIDE + 1], vocab=9), f"offsets has {WIDE + 1} at 1"),
        (lambda f: Forest.from_nodes([None, NARROW], [1, 1]), f"parents has {NARROW} at 1"),
        (lambda f: Forest.from_nodes([None], [WIDE + 1]), f"lengths has {WIDE + 1} at 0"),
        (lambda f: Forest.from_nodes([None], [3], [Ending(NARROW, 3)]), f"node is {NARROW}"),
        (
            lambda f: planned(f, microbatch_rows=NARROW + 8),
            f"microbatch_rows is {NARROW + 8}; accepted",
        ),
        (lambda f: planned(f, device_bytes=-1), "device_bytes is -1; accepted: 0 to"),
        (lambda f: planned(f, loss_from=[-1] * 5), "loss_from has -1 at 0"),
        (lambda f: planned(f, spans=[[(1, WIDE + 2)]] + [[]] * 4), f"spans has {WIDE + 2} at 1"),
        (lambda f: planned(f, model=dataclasses.replace(SHAPE, layers=-1)), "layers is -1"),
        (lambda f: planned(f, machine=Machine(flops_per_s=WIDE + 1)), f"flops_per_s is {WIDE + 1}"),
    ],
)
def test_numbers_that_c_has_no_room_for_are_refused(call, sentence):
    with Forest.from_ids(SEQUENCES, vocab=100, grow=True) as forest:
        with pytest.raises(ArgumentError, match=sentence):
            call(forest)
        assert forest.info()["sequences"] == 5


def planned(forest, **options):
    return Plan(forest, **{"model": SHAPE, "microbatch_rows": 8, **options})


def test_numbers_of_other_types_are_taken_as_they_are():
    with Forest.from_ids(SEQUENCES, vocab=np.int64(100)) as forest:
        rows, bytes_ = np.uint32(8), torch.tensor(1 << 40)
        with planned(forest, microbatch_rows=rows, device_bytes=bytes_, spans=[[]] * 5) as plan:
            assert [op.scores for op in plan] == [(), (), (), ()]
        with pytest.raises(TypeError):
            planned(forest, microbatch_rows=8.0)


def test_kinds_share_nothing():
    with Forest.from_ids(SEQUENCES, vocab=100, kinds=[0, 1, 0, 0, 0]) as forest:
        assert forest.info()["roots"] == 3


def test_a_forest_grows_to_the_same():
    with Forest.from_ids([], vocab=100, grow=True) as grown:
        assert grown.info()["sequences"] == 0
        for number, ids in enumerate(SEQUENCES):
            ids = torch.tensor(ids, dtype=torch.int32) if number % 2 else ids
            assert grown.add(ids) == number
            assert grown.info()["sequences"] == number + 1
        with pytest.raises(ArgumentError, match="token id 100"):
            grown.add([1, 100])
        with Forest.from_ids(SEQUENCES, vocab=100) as whole:
            assert grown.nodes() == whole.nodes()
            with pytest.raises(StateError, match="SEQUENCES_GROW"):
                whole.add([1])
    with Forest.from_ids(SEQUENCES[:2], vocab=100, grow=True) as begun:
        assert begun.add([7], kind=3) == 2
        assert begun.info()["roots"] == 2


def test_counted_tokens_make_a_forest():
    with Forest.from_nodes([None, 0, 0], [5, 2, 3]) as forest:
        assert forest.endings() == [Ending(1, 7), Ending(2, 8)]
    ends = [Ending(2, 8), Ending(0, 4), Ending(1, 7), Ending(1, 6)]
    with Forest.from_nodes([None, 0, 0], [5, 2, 3], ends) as forest:
        assert forest.endings() == ends
        described = {
            "parents": [None, 0, 0],
            "lengths": [5, 2, 3],
            "endings": [{"node": it.node, "tokens": it.tokens} for it in ends],
        }
        assert json.loads(forest.to_json()) == described
    with pytest.raises(ArgumentError, match="node 2 has parent 2"):
        Forest.from_nodes([None, 0, 2], [1, 1, 1])
    with pytest.raises(ArgumentError, match="lengths has 1 values"):
        Forest.from_nodes([None, 0], [1])


def test_a_batch_is_planned_op_by_op():
    with Forest.from_ids(SEQUENCES, vocab=100) as forest:
        weights = [1.0, -0.5, 2.0, 4.0, 8.0]
        plan = Plan(forest, model=SHAPE, weights=weights, microbatch_rows=8)
    with plan:
        assert [node.parent for node in plan.nodes()] == [None, 0, 0, None]
        assert [node.rows for node in plan.nodes()] == [
            range(2),
            range(2, 3),
            range(2, 4),
            range(1),
        ]
        ops = list(plan)
        assert [(op.kind, op.node, op.reads) for op in ops] == [
            (OpKind.MICROBATCH, None, None),
            (OpKind.PREFIX_FORWARD, 0, None),
            (OpKind.MICROBATCH, 0, 0),
            (OpKind.PREFIX_BACKWARD, 0, None),
        ]
        assert [op.id for op in ops] == [0, 1, 2, 3]
        alone, _, microbatch, backward = ops
        assert [(it.node, it.rows, it.first_position) for it in microbatch.members] == [
            (1, range(1), 2),
            (2, range(1, 3), 2),
        ]
        assert microbatch.is_last and [it.sequence for it in alone.members] == [4]
        # Two sequences score the one row they share, each with its own weight.
        assert [(it.sequence, it.rows, it.first_label, it.weight) for it in microbatch.scores] == [
            (0, range(1), 3, 1.0),
            (3, range(1), 3, 4.0),
            (1, range(1, 3), 3, -0.5),
        ]
        assert sorted((it.sequence, it.rows.stop) for it in backward.scores) == [
            (0, 2),
            (1, 2),
            (2, 1),
            (3, 2),
        ]
        assert list(plan) == [], "it is over"


def test_a_batch_s_prediction_has_seconds_where_there_are_rates():
    with Forest.from_nodes([None, 0, 0], [50, 20, 30]) as forest:
        with Plan(forest, model=SHAPE, microbatch_rows=64) as plan:
            assert plan.predict()["seconds_dense"] is None
        machine = Machine(flops_per_s=10**9, op_overhead_ns=1000)
        with Plan(forest, model=SHAPE, microbatch_rows=64, machine=machine) as plan:
            known = plan.predict()
        assert known["seconds_dense"] > known["seconds_shared"] > 0
        assert known["seconds_dense"] == pytest.approx(known["flops_dense"] / 1e9, rel=0.1)
        assert max(known["device_bytes"]) > 0 and known["recomputed_rows"] == 0


def test_a_batch_that_is_wrong_is_refused():
    with Forest.from_ids(SEQUENCES, vocab=100) as forest:
        for options, sentence in [
            ({"weights": [1.0]}, "weights has 1 values; accepted: 5"),
            ({"loss_from": [1] * 4}, "loss_from has 4 values"),
            ({"loss_from": [1, 1, 3, 1, 1]}, "sequence 2 scores labels 3"),
            ({"spans": [[(1, 2)]]}, "spans has 1 values"),
            ({"loss_from": [1] * 5, "spans": [[]] * 5}, "accepted: one of them"),
            ({"weights": [float("nan")] * 5}, "weight 0 is NaN"),
            ({"microbatch_rows": 0}, "microbatch_rows is 0"),
            ({"device_bytes": 10}, "needs .* bytes of 10 on the device"),
        ]:
            with pytest.raises(ArgumentError, match=sentence):
                Plan(forest, model=SHAPE, **{"microbatch_rows": 8, **options})


def test_a_group_is_a_tree_of_depth_one():
    shape = ModelShape(**{**vars(SHAPE), "vocab": 97})
    with Plan.of_group(group(), microbatch_rows=16, model=shape) as plan:
        ops = list(plan)
    assert ops[0].kind is OpKind.PREFIX_FORWARD and ops[-1].kind is OpKind.PREFIX_BACKWARD
    leaves = {it.node for op in ops for it in op.members}
    assert leaves == set(range(1, len(group().responses) + 1))
    assert {ops[0].residency, ops[-1].residency} == {"sleep"}


def test_the_documented_examples_are_answered():
    pages = sorted(set(DOCS.glob("*.md")) - {DOCS / "README.md"})
    assert len(pages) > 20
    for page in pages:
        name = page.stem
        request, answer = re.findall(r"```json\n(.*?)```", page.read_text(), re.S)
        fields = {k: v for k, v in json.loads(request).items() if k not in ("version", "query")}
        wanted, seen = json.loads(answer)["answer"], query(name, **fields)
        if isinstance(wanted, str) and wanted.endswith("…"):
            assert seen.startswith(wanted[:-1]), name
        else:
            assert seen == wanted, name


def test_what_a_query_refuses_is_an_argument():
    with pytest.raises(ArgumentError, match='unknown query "shapes"; accepted: plan, rates'):
        query("shapes")
    with pytest.raises(ArgumentError, match="unknown field modle"):
        query("rates", model=SHAPE, machine=Machine(), modle=1)
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        query("fit", samples={1})


def test_shares_of_a_forest_cover_its_sequences():
    with Forest.from_ids(SEQUENCES, vocab=100) as forest:
        answer = planning.shares(forest, ranks=2, microbatch_tokens=8, model=SHAPE)
        by_rank = [share["sequences"] for share in answer["shares"]]
        assert sorted(sum(by_rank, [])) == list(range(5)) and all(by_rank)
        exchanged = planning.shares(
            forest,
            ranks=2,
            microbatch_tokens=8,
            model=SHAPE,
            machine=Machine(flops_per_s=10**6, link_bytes_per_s=10**12),
            exchange=True,
        )
        assert exchanged["largest_ps"] <= answer["uncut_ps"] * 10**9


def test_helpers_ask_what_their_names_say():
    fitted = planning.fit([({"steps": 1, "rows": 100}, 3.0), ({"steps": 1, "rows": 200}, 5.0)])
    assert fitted["rates"]["rows"] == pytest.approx(0.02)
    microbatch = {"rows": 2, "forward_ns": 50, "backward_ns": 100}
    one = {"prefix_rows": 4, "forward": {"linear_ns": 100}, "microbatches": [microbatch]}
    stages = planning.pipeline([one], stages=2, chunks=2, order="group_by_group")
    assert len(stages["stages"]) == 2 and stages["report"]["chunks"] == 2
    piece = {"sequence": 0, "first_position": 4, "rows": 3, "prefix": 0}
    piece["labels"] = {"begin": 5, "end": 8}
    assert planning.layout([piece], multiple=4)["padding_rows"] == 1
    assert planning.layout([piece, piece], form="padded")["batch"] == 2
    root = {**piece, "first_position": 0, "prefix": None, "labels": {"begin": 0, "end": 0}}
    kv = {"layers": 2, "row_bytes": 64, "gradient_row_bytes": 128}
    cut = planning.context([root], [piece], ranks=3, kv=kv, cut={"balanced": {"chunks": 2}})
    assert len(cut["prefix"]["ranks"]) == len(cut["microbatch"]["ranks"]) == 3
    with Forest.from_nodes([None, 0, 0], [5, 2, 3]) as forest:
        accounting = planning.experts(
            forest,
            [0, 0],
            baseline={"scopes": [0, 0], "scope_weights": [1.0]},
            router={"experts": 2, "top_k": 1, "layers": 1, "aux_coefficient": 0.01},
        )
    assert [portion["copies"] for portion in accounting["portions"]] == [2, 1, 1]


def test_prefixes_of_a_pipeline_sleep_as_asked():
    microbatch = {"rows": 2, "forward_ns": 50, "backward_ns": 100}
    prefix = {"prefix_rows": 4, "forward": {"linear_ns": 100}, "backward": {"linear_ns": 200}}
    held = {"stage_bytes": [{"prefix_saved": 10, "boundary": 1}] * 2, "chunks": 1}
    groups = [prefix | {"microbatches": [microbatch]}] * 2
    peaks = []
    for sleep in ("never", "always"):
        lists = planning.pipeline(groups, stages=2, sleep=sleep, **held)
        assert lists["report"]["prefix_saved_asleep"] == (sleep == "always")
        peaks.append(lists["stages"][0]["peak"]["bytes"])
    # Boundaries of both groups, and 40 bytes of each or of the one whose op runs.
    assert peaks == [88, 48]


def test_rollouts_are_assigned_and_moved():
    history = [{"prompt": 7, "steps": [[40, 60]]}, {"prompt": 9, "steps": [[500]]}]
    requests = [
        {"prompt": prompt, "prompt_tokens": 10, "responses": 1, "begun_tokens": 0}
        for prompt in (7, 9)
    ]
    assignment = planning.rollout_assign(history, requests, step=1, workers=2, groups=2)
    assert [it["worker"] for it in assignment["placed"]] == [0, 1]
    rollouts = [
        {"request": worker, "response": 0, "worker": worker, "tokens": 100, "finished": False}
        for worker in (0, 1)
    ]
    options = {"tail_permille": 1000, "growth_permille": 1500, "batch_max": 8}
    moves = planning.rollout_migrate(assignment, requests, rollouts, **options)
    assert [(it["request"], it["to"]) for it in moves] == [(0, {"worker": 1})]


def test_an_answer_longer_than_the_first_buffer_arrives_whole():
    answer = query("padded_microbatches", rows=[3] * 20_000, budget_rows=3, multiple=1)
    assert len(answer) == 20_000 and answer[-1] == {"members": [19_999], "width": 3}


def test_a_long_answer_is_computed_once_where_the_last_was_as_long(monkeypatch):
    called, call = [], queries.native.call

    def counted(name, *arguments):
        called.append(name)
        return call(name, *arguments)

    monkeypatch.setattr(queries.native, "call", counted)
    monkeypatch.setattr(queries, "_last_bytes", {})

    def asked(rows):
        called.clear()
        query("padded_microbatches", rows=[3] * rows, budget_rows=3, multiple=1)
        return called

    assert asked(20_000) == ["schedule_query"] * 2
    assert asked(20_000) == ["schedule_query"]
    assert asked(21_000) == ["schedule_query"], "there is room for a little more"
