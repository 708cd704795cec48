"""Generated traces: the committed files are what the code makes, and as hard as they say."""

from __future__ import annotations

import best_fit
import experts
import generate
import pytest
import summary
from builder import Builder
from command import HERE, chosen
from format import ALLOCATE, FREE, Event, read

FILE_BYTES_MAX = 150 << 10
EVENTS_MAX = 40_000


@pytest.mark.parametrize("name", generate.GENERATORS)
def test_the_committed_file_is_what_the_code_makes(name):
    path = HERE / f"{name}.csv.xz"
    command = f"python benches/traces/generate.py {name}"
    assert read(path) == generate.GENERATORS[name](), f"run: {command}"


def test_a_file_is_written_where_it_is_asked_for(tmp_path):
    assert generate.main(["stream_rotation", "--out", str(tmp_path)]) == 0
    assert read(tmp_path / "stream_rotation.csv.xz").events


def test_an_unknown_name_is_refused(capsys):
    for arguments in (["nonsense"], []):
        with pytest.raises(SystemExit):
            chosen(arguments, ["a", "b"], "doc")
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(HERE.glob("*.csv.xz")), ids=lambda path: path.name)
def test_every_file_is_small(path):
    assert path.stat().st_size <= FILE_BYTES_MAX
    assert len(read(path).events) <= EVENTS_MAX


def test_a_rotation_strands_memory_that_is_kept_by_stream():
    events = generate.stream_rotation().events
    peak = summary.summarise(events).peak_bytes
    by_stream = [
        summary.summarise([e for e in events if e.stream == stream]).peak_bytes
        for stream in {e.stream for e in events}
    ]
    assert len(by_stream) == generate.STREAMS
    assert sum(by_stream) > 5 * peak


def test_an_expert_parallel_rank_receives_other_amounts_on_streams_of_its_own():
    events = generate.expert_parallel().events
    sizes = {stream: {e.size for e in events if e.stream == stream} for stream in (1, 2)}
    assert len(sizes[1]) == experts.STEPS * experts.LAYERS
    assert len(sizes[2]) == experts.STEPS
    peaks = [
        summary.summarise([e for e in events if e.stream == stream]).peak_bytes
        for stream in (0, 1, 2)
    ]
    assert sum(peaks) > 1.01 * summary.summarise(events).peak_bytes


HARDER_THAN = {  # share of the peak that is lost: by best fit, by pages of their own
    "comb": (3.0, 0.0),
    "pinned-holes": (0.2, 0.09),
    "growth": (0.04, 0.0),
    "off-by-little": (0.0, 0.09),
    "churn": (0.15, 0.04),
}


@pytest.mark.parametrize("part", HARDER_THAN)
def test_each_adversary_is_one(part):
    events = generate.adversarial().parts()[part]
    s = summary.summarise(events)
    assert s.best_fit_cost >= HARDER_THAN[part][0]
    assert s.page_cost >= HARDER_THAN[part][1]
    assert s.end_bytes == 0, "the next part begins with nothing live"


def test_every_adversary_is_tested():
    assert generate.adversarial().parts().keys() == HARDER_THAN.keys()


def test_names_are_the_lowest_that_are_free():
    made = Builder()
    first, second = made.allocate(10, stream=3, scope=2, thread=1), made.allocate(20)
    made.free(first, thread=4)
    assert made.allocate(30) == first
    assert made.events[0] == Event(1, ALLOCATE, first, 10, 3, 2)
    assert made.events[2] == Event(4, FREE, first, 10, 3, 2)
    assert made.live == [second, first]


def naive_span(events) -> int:
    """Best fit by looking at every byte."""
    taken, at, end = set(), {}, 0
    for event in events:
        if event.action == FREE:
            taken -= at.pop(event.pointer)
            continue
        holes, start = [], None
        for byte in range(end + 1):
            if byte < end and byte not in taken:
                start = byte if start is None else start
            elif start is not None:
                holes.append((byte - start, start))
                start = None
        fits = [(size, place) for size, place in holes if size >= event.size]
        if fits:
            place = min(fits)[1]
        else:
            # What the last hole lacks, if it is at the end.
            place = next((p for size, p in holes if p + size == end), end)
            end = place + event.size
        at[event.pointer] = set(range(place, place + event.size))
        assert not taken & at[event.pointer]
        taken |= at[event.pointer]
    return end


@pytest.mark.parametrize("seed", range(40))
def test_best_fit_is_best_fit(seed):
    import random

    chance, made, live = random.Random(seed), Builder(), []
    for _ in range(120):
        if live and chance.random() < 0.45:
            made.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(made.allocate(chance.randint(1, 12)))
    assert best_fit.span_bytes(made.events) == naive_span(made.events)
