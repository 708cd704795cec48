"""The page of a dump in a real browser: opened, clicked, dragged, touched, compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PHONE, WIDE, settle
from playwright.sync_api import Page

NS_PER_S = 1_000_000_000


def view_ns(page: Page) -> tuple[float, float]:
    """The stretch in view, on the axis without pauses."""
    return tuple(page.evaluate("[view.from, view.to]"))


def step_ns(page: Page, at: int) -> tuple[float, float]:
    """A step on the axis without pauses."""
    return tuple(page.evaluate(f"[fold(steps[{at}].from), fold(steps[{at}].to)]"))


def place(page: Page, expression: str) -> tuple[float, float]:
    """Scrolls to what ``expression``, a found slice, draws; returns its middle in the window."""
    return tuple(
        page.evaluate(
            f"""(() => {{
                const box = boxOf({expression}), at = () => canvas.getBoundingClientRect();
                scrollBy(0, at().top + box.centre - innerHeight / 2);
                return [at().left + (box.x0 + box.x1) / 2, at().top + box.centre];
            }})()"""
        )
    )


FIRST_READ = (
    "({ lane: lanes[6], i: lanes[6].slices[0].find((i) => lanes[6].start_ns[i] > nsOf(gutter)) })"
)


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_it_opens_on_the_last_step_and_answers(open_page, size: tuple[int, int]) -> None:
    with open_page(size) as page:
        assert page.inner_text("#step").startswith("step 3 of 3 · 2.53 s · peak 1.21 GiB")
        answer = page.inner_text(".answer")
        assert "Peak 1.21 GiB in phase B: suffixes, microbatch 3" in answer
        assert "Compute waited" in answer and "late read" in answer
        from_ns, to_ns = view_ns(page)
        begin_ns, end_ns = step_ns(page, 2)
        assert from_ns < begin_ns < end_ns < to_ns < end_ns + 0.1 * NS_PER_S
        assert page.evaluate("timeWidth() / width") > 0.85, "the gutter is narrow"
        wide_px = page.evaluate("document.scrollingElement.scrollWidth")
        assert wide_px <= size[0], "nothing is beyond the edge"


def test_the_picture_and_the_words_agree_to_the_byte(wide: Page) -> None:
    """The stack adds up, and its highest column is the peak that the page names."""
    told = wide.evaluate(
        """(() => {
            const at = data.peak.at_ns;
            const { parts, totals } = columnsOf(data, stack, 1, (column) => at + column - 0.5);
            const held = stack.map(({ title }, i) => [title, parts[i][0]]);
            const owners = data.peak.owners.map(({ title, bytes }) => [title, bytes]);
            return {
                peaks: [data.peak.bytes, peakOf(awake), totals[0], data.totals.peak_bytes[0]],
                parts: Object.fromEntries(held), owners: Object.fromEntries(owners),
            };
        })()"""
    )
    assert set(told["peaks"]) == {sum(told["parts"].values())}
    assert {title: held for title, held in told["parts"].items() if held} == told["owners"]


def test_a_click_on_a_wait_leads_to_its_copy(wide: Page) -> None:
    row = wide.locator("tr[data-from]").first
    copy = row.locator("td").nth(4).inner_text().split(" (")[0]
    row.click()
    settle(wide)
    said = wide.inner_text("#hover")
    assert said.startswith(f"{copy} · nvme read")
    assert "before, in queue" in said and "195 MiB/s of 2.54 GiB/s" in said
    from_ns, to_ns = view_ns(wide)
    assert to_ns - from_ns < 0.6 * NS_PER_S, "it has come near"
    wide.focus("#stage")
    wide.keyboard.press("Escape")
    assert wide.evaluate("pinned") is None


def test_a_copy_under_the_pointer_says_what_it_is_and_a_click_keeps_it(wide: Page) -> None:
    x, y = place(wide, FIRST_READ)
    wide.mouse.move(x, y)
    settle(wide)
    said = wide.inner_text("#hover")
    assert "read · nvme read" in said and "moved" in said and "38.0 MiB" in said
    wide.mouse.click(x, y)
    kept = wide.inner_text("#hover")
    wide.mouse.move(x - 300, y - 200)
    settle(wide)
    assert wide.inner_text("#hover") == kept
    wide.mouse.click(x - 300, y - 200)
    settle(wide)
    assert "38.0 MiB" not in wide.inner_text("#hover")


def test_the_pointer_over_the_device_names_its_owners(wide: Page) -> None:
    wide.evaluate("byId('picture').scrollIntoView({ block: 'start' })")
    point = wide.evaluate(
        """(() => {
            const on = canvas.getBoundingClientRect();
            const item = layout.find(({ kind }) => kind === "device");
            return [on.left + xOf(data.peak.at_ns), on.top + item.top + item.height / 2];
        })()"""
    )
    wide.mouse.move(*point)
    settle(wide)
    said = wide.inner_text("#hover").replace("\n", " ")
    for owner in ("K and V", "accumulators", "tag optimizer", "tag weights", "other"):
        assert f"· {owner}" in said


def test_a_drag_zooms_into_a_stretch_and_a_double_click_out(wide: Page) -> None:
    before = view_ns(wide)
    wide.evaluate("byId('picture').scrollIntoView({ block: 'start' })")
    box = wide.locator("#canvas").bounding_box()
    y = box["y"] + 200
    wide.mouse.move(box["x"] + 400, y)
    wide.mouse.down()
    wide.mouse.move(box["x"] + 500, y, steps=5)
    wide.mouse.move(box["x"] + 600, y, steps=5)
    wide.mouse.up()
    settle(wide)
    after = view_ns(wide)
    assert before[0] < after[0] < after[1] < before[1]
    part = (after[1] - after[0]) / (before[1] - before[0])
    assert part == pytest.approx(200 / (box["width"] - 152 - 14), rel=0.02)
    wide.mouse.dblclick(box["x"] + 500, y)
    settle(wide)
    from_ns, to_ns = view_ns(wide)
    assert to_ns - from_ns > 3 * (before[1] - before[0]) * 0.9, "all three steps"


def test_steps_and_buttons_move_the_view(wide: Page) -> None:
    wide.click("#earlier")
    settle(wide)
    assert wide.inner_text("#step").startswith("step 2 of 3")
    (from_ns, to_ns), (begin_ns, end_ns) = view_ns(wide), step_ns(wide, 1)
    assert from_ns < begin_ns < end_ns < to_ns
    wide.locator("#steps button").nth(0).click()
    assert wide.inner_text("#step").startswith("step 1 of 3")
    wide.click("#to-peak")
    settle(wide)
    from_ns, to_ns = view_ns(wide)
    assert from_ns < wide.evaluate("fold(data.peak.at_ns)") < to_ns < from_ns + NS_PER_S


def test_pauses_are_folded_and_time_keeps_its_order(wide: Page) -> None:
    folds = wide.evaluate("folds")
    assert [round((fold["to"] - fold["from"]) / NS_PER_S) for fold in folds][:2] == [4, 4]
    errors = wide.evaluate(
        """(() => {
            const wrong = [];
            let before = -Infinity;
            for (let i = 0; i <= 1000; i += 1) {
                const ns = (i / 1000) * data.window_ns, place = fold(ns);
                if (place <= before || Math.abs(unfold(place) - ns) > 1) wrong.push(ns);
                before = place;
            }
            return wrong;
        })()"""
    )
    assert errors == []
    assert wide.evaluate("whole.to") < 8 * NS_PER_S, "without the pauses"


def test_two_dumps_are_compared(open_page, dump: Path, other_dump: Path) -> None:
    for size in (WIDE, PHONE):
        with open_page(size) as page:
            assert page.is_hidden("#compare")
            page.set_input_files("#other-file", str(other_dump))
            page.wait_for_selector("#compare:visible")
            cells = page.evaluate(
                """[...document.querySelectorAll("#compared tr")].map((row) =>
                    [...row.cells].map((cell) => cell.textContent))"""
            )
            rows = {key: values for key, *values in cells}
            assert rows["peak awake"] == ["1.21 GiB", "1.21 GiB", "="]
            assert rows["nvme read, bytes"] == ["2.67 GiB", "912 MiB", "−66.7 %"]
            assert rows["compute waited"][2] == "−66.7 %"
            painted = page.evaluate(
                """[0, 1].map((at) => {
                    const target = byId(`stack-${at}`), brush = target.getContext("2d");
                    const { data } = brush.getImageData(0, 0, target.width, target.height);
                    return data.some((value) => value > 0);
                })"""
            )
            assert painted == [True, True]


def test_a_file_that_is_no_dump_says_so(wide: Page, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.html"
    stranger.write_text("<html></html>")
    wide.set_input_files("#other-file", str(stranger))
    wide.wait_for_selector("#trouble:not(:empty)")
    assert wide.inner_text("#trouble") == "stranger.html: the file is not a page of dormouse"
    assert wide.is_hidden("#compare")


def drag_fingers(page: Page, path: list[list[tuple[float, float]]]) -> None:
    """Puts fingers down, moves them along and lifts them, as the screen does."""
    session = page.context.new_cdp_session(page)
    for at, points in enumerate([*path, []]):
        kind = "touchEnd" if not points else "touchMove" if at else "touchStart"
        fingers = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(points)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": fingers})
    settle(page)


def test_a_tap_keeps_the_tooltip(phone: Page) -> None:
    x, y = place(phone, FIRST_READ)
    phone.touchscreen.tap(x, y)
    settle(phone)
    assert phone.is_visible("#hover") and "nvme read" in phone.inner_text("#hover")
    box, shown = phone.locator("#hover").bounding_box(), phone.locator("#stage").bounding_box()
    assert box["x"] >= shown["x"] and box["x"] + box["width"] <= shown["x"] + shown["width"]


def test_a_finger_pans_and_two_pinch(phone: Page) -> None:
    phone.evaluate("byId('picture').scrollIntoView({ block: 'start' })")
    box = phone.locator("#canvas").bounding_box()
    y = box["y"] + 150
    phone.click("#closer")
    settle(phone)
    before = view_ns(phone)
    drag_fingers(phone, [[(x, y)] for x in (250, 240, 220, 200, 180, 150)])
    panned = view_ns(phone)
    assert panned[0] > before[0]
    assert panned[1] - panned[0] == pytest.approx(before[1] - before[0], rel=0.05)
    drag_fingers(phone, [[(150 - by, y), (250 + by, y)] for by in (0, 10, 20, 30, 40, 50)])
    pinched = view_ns(phone)
    assert (pinched[1] - pinched[0]) / (panned[1] - panned[0]) == pytest.approx(0.5, abs=0.1)


def test_the_colours_follow_the_scheme_and_patterns_stay(open_page) -> None:
    fills = {}
    for scheme in ("light", "dark"):
        with open_page(WIDE, scheme=scheme) as page:
            fills[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            # Owners of one brightness differ by their hatching: a tile has several colours.
            tones = page.evaluate(
                """["dormant", "accumulators", "tag-0", "tag-1"].map((look) => {
                    const tile = document.createElement("canvas"), brush = tile.getContext("2d");
                    tile.width = tile.height = 16;
                    brush.fillStyle = patternOf(look).fill;
                    brush.fillRect(0, 0, 16, 16);
                    const { data } = brush.getImageData(0, 0, 16, 16), seen = new Set();
                    for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
                    return seen.size;
                })"""
            )
            assert min(tones) > 1
    assert fills["light"] != fills["dark"]
