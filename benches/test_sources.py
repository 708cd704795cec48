"""Programs that no other test imports: benchmarks, examples and workers."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for folder in ("benches", "examples", "python", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_is_python(path: Path) -> None:
    """A merge that was left undone is not, for one."""
    compile(path.read_text(), str(path), "exec")
