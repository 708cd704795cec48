"""Packing of traces."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from traces import (
    KIND_ALLOCATE,
    KIND_END_SCOPES,
    KIND_FREE,
    RECORD,
    SCOPE_GAP_EVENTS,
    TraceError,
    find,
    has_scopes,
    pack,
    pack_file,
    stem,
)

HEAD = "Thread,Time,Action,Pointer,Size,Stream,Scope"


def packed(*events: str, head: str = HEAD) -> list[tuple[int, ...]]:
    return [RECORD.unpack(record) for record in pack([head, *events])]


def test_slots_and_streams_are_numbered() -> None:
    assert packed(
        "0,0,allocate,0xa,100,0,0",
        "0,1,allocate,0xb,200,0x7f00,0",
        "0,2,free,0xa,100,0x7f00,0",
        "0,3,allocate,0xc,300,0x8000,0",
        "0,4,allocate,0xa,400,(nil),0",
    ) == [
        (KIND_ALLOCATE, 0, 100, 0, 0),
        (KIND_ALLOCATE, 1, 200, 1, 0),
        # Freed on the stream it was allocated for.
        (KIND_FREE, 0, 100, 0, 0),
        (KIND_ALLOCATE, 0, 300, 2, 0),
        (KIND_ALLOCATE, 2, 400, 0, 0),
    ]


def test_rmms_own_log_has_no_scopes() -> None:
    head = "Thread,Time,Action,Pointer,Size,Stream"
    assert packed("0,0,allocate,0xa,1,0", head=head) == [(KIND_ALLOCATE, 0, 1, 0, 0)]


def test_what_had_no_effect_is_left_out() -> None:
    assert (
        packed(
            "0,0,allocate failure,(nil),100,0,0", "0,1,allocate,(nil),0,0,0", "0,2,free,(nil),0,0,0"
        )
        == []
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ("0,1,allocate,0xa,1,0,0", "0xa is allocated twice"),
        ("0,1,free,0xb,1,0,0", "0xb is freed"),
        ("0,1,resize,0xa,1,0,0", "resize"),
    ],
)
def test_what_cannot_be_replayed_is_refused(event: str, words: str) -> None:
    with pytest.raises(TraceError, match=f"line 3: .*{words}"):
        packed("0,0,allocate,0xa,1,0,0", event)


def test_scopes_end_before_a_gap_and_behind_the_last() -> None:
    def scoped(pointer: int, scope: int) -> str:
        return f"0,0,allocate,{pointer:#x},1,0,{scope}"

    def plain(count: int, first: int) -> list[str]:
        return [scoped(first + index, 0) for index in range(count)]

    short, long = plain(SCOPE_GAP_EVENTS - 2, 0x1000), plain(SCOPE_GAP_EVENTS, 0x10000)
    records = packed(scoped(1, 1), *short, scoped(2, 2), *long, scoped(3, 3))
    ends = [index for index, record in enumerate(records) if record[0] == KIND_END_SCOPES]
    assert ends == [len(short) + 2, len(records) - 1]
    assert has_scopes(b"".join(RECORD.pack(*record) for record in records))
    assert not has_scopes(RECORD.pack(KIND_FREE, 0, 1, 0, 0))


def test_files_are_found_plain_and_compressed(tmp_path: Path) -> None:
    text = f"# where it is from\n{HEAD}\n0,0,allocate,0xa,1,0,0\n"
    (tmp_path / "b.csv").write_text(text)
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(text.encode()))
    found = find(tmp_path)
    assert [stem(path) for path in found] == ["a", "b"]
    assert pack_file(found[0]) == pack_file(found[1]) == RECORD.pack(KIND_ALLOCATE, 0, 1, 0, 0)
