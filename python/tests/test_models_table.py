"""docs/models.md has a row for every causal architecture of transformers, and says what the tests
of test_architectures.py find. `make bench-models` writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_zoo import EXACT, REFUSED
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
VERDICTS = ("exact", "refused", "not built")


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """Cells of each architecture's row: model type, class, verdict, distance, text."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.fixture(scope="module")
def verdicts(rows) -> dict[str, str]:
    return {cells[0].strip("`"): cells[2] for cells in rows}


def test_every_architecture_has_one_row_and_nothing_else_has(rows):
    names = [cells[0].strip("`") for cells in rows]
    assert names == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_every_row_has_a_verdict_and_what_belongs_to_it(rows):
    for cells in rows:
        kind, _, verdict, distance, text = cells
        assert verdict in VERDICTS, kind
        assert (float(distance) <= 1e-6) if verdict == "exact" else not distance, kind
        assert text or verdict == "exact", f"{kind} has no reason"


@pytest.mark.parametrize("kind", EXACT)
def test_what_the_tests_find_exact_is_exact(kind, verdicts):
    assert verdicts[kind] == "exact"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_tests_find_refused_is_refused(kind, verdicts):
    assert verdicts[kind] == "refused"


def test_the_counts_are_those_of_the_rows(verdicts):
    lines = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines()]
    counts = {cells[0]: int(cells[1]) for cells in lines if cells[0] in VERDICTS}
    assert counts == {kind: list(verdicts.values()).count(kind) for kind in VERDICTS}
