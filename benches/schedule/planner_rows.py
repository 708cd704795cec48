"""Rows of what planning takes and how good plans are: from the examples of ``schedule/`` and ``parallel/``."""

from __future__ import annotations

from collections.abc import Callable

from examples import example
from rows import HIGHER, LOWER, Row

IDS_SECONDS = 2.0
IDS_MEMORY_RATIO = 2.0
NODES_SECONDS = 5.0
IMBALANCE = 1.02
BUBBLE = 0.12
BUBBLE_CASE = {"machine": "ideal", "virtual_stages": 1, "blocking": False}

# AReaL-DTA, from its slides: τ²-bench at 16k context, whole trees and after its packing.
PUBLISHED_COMPRESSION = {"areal_dta_published": 9.43, "areal_sparse_published": 7.47}


def forest() -> list[Row]:
    found = example("forest_cost")
    what = (
        f"forest_cost: {found['sequences']} sequences, {found['ids']} ids of {found['id_bytes']} "
        "bytes, system prompt of 4.8k tokens, branching turns, 16k context, one thread"
    )
    return [
        Row("plan_ids_seconds", "s", LOWER, what, found["plan_ids_seconds"], IDS_SECONDS),
        Row(
            "plan_ids_memory_ratio",
            "ratio",
            LOWER,
            f"{what}; most bytes held, the ids among them, over the ids",
            found["plan_ids_memory_ratio"],
            IDS_MEMORY_RATIO,
        ),
        Row(
            "tree_compression_over_optimum",
            "ratio",
            HIGHER,
            f"{what}; tokens of the best tree, found by sorting whole sequences, over ours",
            found["tree_compression_over_optimum"],
            1.0,
        ),
        Row(
            "tree_compression",
            "ratio",
            HIGHER,
            f"{what}; tokens of all sequences over tokens of the tree; peers: published, of "
            "another τ²-bench input",
            found["compression"],
            peers=dict(PUBLISHED_COMPRESSION),
        ),
    ]


def nodes() -> list[Row]:
    found = example("plan_cost")
    how = f"plan_cost: ops, residency and prediction of {found['nodes']} nodes given as lengths"
    seconds = found["plan_nodes_seconds"]["seconds"]
    return [Row("plan_nodes_seconds", "s", LOWER, how, seconds, NODES_SECONDS)]


def shares() -> list[Row]:
    case = example("balance_cost")["tau2_20000_sequences"]
    return [_imbalance(case, ranks) for ranks in (8, 64)]


def _imbalance(case: dict, ranks: int) -> Row:
    ways = case[f"ranks_{ranks}"]
    ours = ways["contiguous_exchange"]
    how = (
        f"balance_cost: {case['sequences']} sequences in {case['groups']} groups on {ranks} ranks; "
        "largest rank cost over an even share of the forest uncut; what ranks share is divided "
        f"or sent where that is cheaper; no cut can do better than {ours['limit']:.4f}"
    )
    peers = {
        name: ways[name]["imbalance"]
        for name in (
            "contiguous_recompute",
            "contiguous_by_tokens_only",
            "longest_first_groups",
            "longest_first_sequences",
        )
    }
    bar = max(IMBALANCE, ours["limit"])
    name = f"dp_imbalance_{ranks}"
    return Row(name, "ratio", LOWER, how, ours["imbalance"], bar, peers)


def bubble() -> list[Row]:
    cases = [
        case
        for case in example("pipeline_cost")["cases"]
        if all(case[key] == value for key, value in BUBBLE_CASE.items())
    ]
    by_way = {case["way"]: case["bubble"] for case in cases}
    ours = "8 chunks, one stream"
    how = (
        "pipeline_cost: 4 stages, 8 microbatches a group, 4 groups, a prefix of 5 microbatches, 1F1B; idle time "
        "over a stage's work; ours: the prefix in 8 chunks and groups as one stream"
    )
    peers = {way: value for way, value in by_way.items() if way != ours}
    return [Row("pipeline_bubble_p4_m8", "ratio", LOWER, how, by_way[ours], BUBBLE, peers)]


MAKERS: list[tuple[list[str], Callable[[], list[Row]]]] = [
    (
        [
            "plan_ids_seconds",
            "plan_ids_memory_ratio",
            "tree_compression_over_optimum",
            "tree_compression",
        ],
        forest,
    ),
    (["plan_nodes_seconds"], nodes),
    (["dp_imbalance_8", "dp_imbalance_64"], shares),
    (["pipeline_bubble_p4_m8"], bubble),
]
