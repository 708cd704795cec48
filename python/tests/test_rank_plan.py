"""Plans that the program made for ranks, loaded and run by a trainer."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch
from models import VOCAB, dense_tree_backward, distance, take_gradients, tiny, token_losses

import dormouse
from dormouse import ArgumentError, Conversation, RankPlan, Tree
from dormouse import _native as native
from dormouse.hf import SharedPrefix
from dormouse.hf.batch import TreeBatch
from dormouse.hf.model_shape import model_shape
from dormouse.hf.outputs import Losses
from dormouse.schedule import Plan

PROGRAM = native.library_path().with_name("dormouse")
FP64_BOUND = 1e-10
RANKS = 2


def batch() -> list[dict]:
    """Conversations that share beginnings, with masks and weights, as a sampler would log them."""
    generator = torch.Generator().manual_seed(5)

    def some(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    rows = []
    for group in range(4):
        prompt, turn = some(9 + group), some(5)
        for sample in range(3):
            own = [*prompt, *(turn if sample else []), *some(4 + sample)]
            scored = [int(at >= len(prompt) and at % 5 != 2) for at in range(len(own))]
            name = f"{group}/{sample}" if group else group * 10 + sample
            rows.append({"tokens": own, "mask": scored, "weight": 0.1 + sample / 3, "uid": name})
    return rows


def conversations(rows: list[dict]) -> list[Conversation]:
    return [
        Conversation(row["tokens"], torch.tensor(row["mask"], dtype=torch.bool), row["weight"])
        for row in rows
    ]


def program(folder, rows: list[dict], shape, *arguments: str) -> str:
    """Plans in ``folder / "out"``."""
    (folder / "batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "shape.json").write_text(json.dumps(vars(shape)))
    command = [PROGRAM, "plan", "batch.jsonl", "--model", "shape.json", "--out", "out"]
    names = ["--column", "tokens", "--loss-mask-column", "mask", "--id-column", "uid"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    told = subprocess.run(
        [*command, *names, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.returncode == 0, told.stderr
    return told.stdout


def planned(tmp_path, shared: SharedPrefix, *arguments: str) -> tuple[list[RankPlan], list[dict]]:
    rows = batch()
    shape = model_shape(shared._view)
    program(tmp_path, rows, shape, "--ranks", str(RANKS), "--microbatch-rows", "9", *arguments)
    files = [tmp_path / "out" / f"rank-{rank}.plan" for rank in range(RANKS)]
    return [RankPlan.load(file) for file in files], rows


def test_a_rank_runs_its_plan_without_planning(tmp_path, runtime, monkeypatch):
    model = tiny()
    shared = SharedPrefix(model, runtime)
    plans, rows = planned(tmp_path, shared)
    all_of_it = [sequence for plan in plans for sequence in plan.sequences]
    assert sorted(it.number for it in all_of_it) == list(range(len(rows)))
    assert all(it.name == rows[it.number]["uid"] for it in all_of_it)
    for rank, plan in enumerate(plans):
        assert (plan.rank, plan.ranks) == (rank, RANKS)
        own = conversations([rows[it.number] for it in plan.sequences])
        dense_tree_backward(model, own)
        dense = take_gradients(model)
        report = shared.backward(own, token_losses, microbatch_tokens=9)
        in_process = take_gradients(model)
        with monkeypatch.context() as patched:
            # The file alone says what runs.
            patched.setattr(Plan, "__init__", lambda *_, **__: pytest.fail("a plan was made"))
            loaded = shared.backward(own, token_losses, plan=plan)
        got = take_gradients(model)
        assert distance(got, in_process) <= FP64_BOUND
        assert distance(got, dense) <= FP64_BOUND
        assert loaded.loss == pytest.approx(report.loss, rel=1e-12)
        assert loaded.counts["prefix_tokens"] > 0


def test_ops_are_those_of_a_plan_in_process(tmp_path, runtime):
    shared = SharedPrefix(tiny(), runtime)
    plans, rows = planned(tmp_path, shared, "--always-share")
    shape = model_shape(shared._view)
    for plan in plans:
        own = conversations([rows[it.number] for it in plan.sequences])
        kept = {"device_bytes": 1 << 40}
        in_process = TreeBatch(Tree(own), Losses(token_losses), **kept).plan(shape, 9)
        with in_process, plan.plan() as loaded:
            ours, theirs = list(loaded), list(in_process)
            ends = [it.rows.stop for it in loaded.nodes()]
        # The program runs sequences to their ends, a step to their last labels.
        assert [op.kind for op in ours] == [op.kind for op in theirs]
        labels = [sum(len(score.rows) for score in op.scores) for op in ours]
        assert labels == [sum(len(score.rows) for score in op.scores) for op in theirs]
        assert max(ends) == max(it.tokens for it in plan.sequences) - 1


def test_other_conversations_than_planned_are_refused(tmp_path, runtime):
    shared = SharedPrefix(tiny(), runtime)
    (plan, other), rows = planned(tmp_path, shared)
    own = [rows[it.number] for it in plan.sequences]

    def refused(rows: list[dict], words: str) -> None:
        with pytest.raises(ArgumentError, match=words):
            shared.backward(conversations(rows), token_losses, plan=plan)

    refused(own[:-1], f"{len(own) - 1} conversations; accepted: the {len(own)} of the plan")
    refused([rows[it.number] for it in other.sequences][: len(own)], "tokens; accepted|token ids")
    first, *rest = own
    number = plan.sequences[0].number
    tokens = [(first["tokens"][0] + 1) % VOCAB, *first["tokens"][1:]]
    refused([{**first, "tokens": tokens}, *rest], f"sequence {number} .* other token ids")
    mask = [*first["mask"][:-1], 1 - first["mask"][-1]]
    refused([{**first, "mask": mask}, *rest], "as planned")
    refused([{**first, "weight": 2.0}, *rest], "as planned")
    with pytest.raises(TypeError, match="plan alone"):
        shared.backward(conversations(own), token_losses, plan=plan, block_tokens=4)
    shape = model_shape(shared._view)
    with pytest.raises(ArgumentError, match=f"layers {shape.layers + 1}; accepted: {shape.layers}"):
        plan.plan_for(native.ModelShape(**{**vars(shape), "layers": shape.layers + 1}))


def test_a_damaged_file_is_refused(tmp_path, runtime):
    plans, _ = planned(tmp_path, SharedPrefix(tiny(), runtime))
    file = tmp_path / "out" / "rank-0.plan"
    text = file.read_text()
    assert RankPlan(text).sequences == plans[0].sequences

    def refused(changed: str, words: str) -> None:
        file.write_text(changed)
        with pytest.raises(ArgumentError, match=words) as caught:
            RankPlan.load(file)
        assert "rank-0.plan" in str(caught.value)

    refused(text.replace('"weight":0.1', '"weight":0.2', 1), "its checksum is")
    refused(text[:-20], "bytes after its first line")
    refused(text.replace('"dormouse_plan":1', '"dormouse_plan":9'), "version 9; accepted: 1")
    refused("", "does not begin as a plan file")
    refused("{}\n{}\n", "does not begin as a plan file")
    with pytest.raises(FileNotFoundError):
        RankPlan.load(tmp_path / "no such file")


def test_one_rank_has_the_whole_batch(tmp_path, runtime):
    shared = SharedPrefix(tiny(), runtime)
    rows = batch()
    program(tmp_path, rows, model_shape(shared._view))
    plan = RankPlan.load(tmp_path / "out" / "rank-0.plan")
    assert (plan.rank, plan.ranks) == (0, 1)
    assert [it.name for it in plan.sequences] == [row["uid"] for row in rows]
    own = conversations(rows)
    assert [plan.labels(at) for at in range(len(own))] == [it.labels for it in own]
    assert dormouse.RankPlan is RankPlan
