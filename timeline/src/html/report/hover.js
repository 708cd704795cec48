// What the pointer, the fingers, the keys and the tables do.

// ---- hover -----------------------------------------------------------------------------------

const sliceAt = (x, y) => {
  const item = layout.find((item) => item.lane && y >= item.top && y < item.top + item.height);
  if (!item) return null;
  const row_px = item.kind === "phases" ? BAND_PX : rowPx(item.lane) + 1;
  const { lane } = item;
  const row = Math.min(lane.rows - 1, Math.floor((y - item.top) / row_px));
  const indices = lane.slices[row];
  const after = above(indices.length, (at) => lane.start_ns[indices[at]], nsOf(x));
  const distance = (i) => Math.max(0, xOf(lane.start_ns[i]) - x, x - xOf(lane.start_ns[i] + lane.duration_ns[i]));
  const near = [indices[after - 1], indices[after]].filter((i) => i !== undefined && distance(i) <= REACH_PX);
  near.sort((a, b) => distance(a) - distance(b));
  return near.length > 0 ? { lane, i: near[0] } : null;
};
const noticesAt = (x, y) => {
  const item = layout.find((item) => item.kind === "notices");
  if (!item || y < item.top - 2 || y > item.top + item.height + 2) return [];
  const { instants } = lanes[7], near = [];
  instants.at_ns.forEach((ns, i) => {
    if (near.length < 5 && Math.abs(xOf(ns) - x) <= REACH_PX + 2) near.push([data.names[instants.name[i]], String(instants.value[i])]);
  });
  return near;
};
const stallOf = (found) => {
  if (found.lane.index !== STALL) return null;
  return data.stalls.find((stall) => stall.from_ns === began(found) && stall.to_ns === ended(found));
};
const describe = (found) => {
  const { lane, i } = found;
  const [ns, moved] = [lane.duration_ns[i], lane.bytes[i]];
  const lines = [["lasted", duration(ns)]];
  if (lane.room_ns[i] > 0) lines.push(["before, for room", duration(lane.room_ns[i])]);
  if (lane.queue_ns[i] > 0) lines.push(["before, in queue", duration(lane.queue_ns[i])]);
  if (moved > 0) lines.push(["moved", bytes(moved)]);
  if (moved > 0 && ns > 0) {
    const best = data.bytes_per_s[lane.index];
    lines.push(["rate", `${bytes((moved / ns) * 1e9)}/s${best > 0 ? ` of ${bytes(best)}/s` : ""}`]);
  }
  const stall = stallOf(found);
  if (stall) lines.push(["cause", stall.cause]);
  if (stall && stall.bound_ns !== null) lines.push(["at least", duration(stall.bound_ns)]);
  if (lane.region[i] > 0) lines.push(["region", data.regions[lane.region[i]]]);
  const title = titleOf(found);
  return { title: lane.copy || lane.index === STALL ? `${title} · ${lane.title}` : title, lines };
};
const levelsAt = (ns) => {
  if (data.levels_from_ns > 0 && !isRecorded(data, ns)) return [["levels", "not recorded"]];
  const total = levelAt(awake, ns);
  const lines = [["awake", bytes(total)]];
  let left = total;
  for (const { title, level } of stack) {
    const value = level ? Math.min(left, levelAt(level, ns)) : left;
    left -= value;
    if (value > 0) lines.push([`· ${title}`, `${bytes(value)} (${share(value, total)})`]);
  }
  lines.push(["cached or staged", bytes(Math.max(0, levelAt(mapped, ns) - total))]);
  for (const tier of tiers) lines.push([tier.title, bytes(levelAt(tier.area, ns))]);
  return lines;
};
const tell = (x, y) => {
  const ns = nsOf(x);
  const step = ((view.to - view.from) / timeWidth()) * 2;
  const lines = [["at", moment(ns, step > 0 ? 10 ** Math.floor(Math.log10(step)) : 1)]];
  let title = "";
  if (found) {
    const said = describe(found);
    title = said.title;
    lines.push(...said.lines);
  } else {
    lines.push(...noticesAt(x, y), ...levelsAt(ns));
  }
  hover.replaceChildren(...(title ? [text("b", title)] : []), ...lines.map(([key, value]) => {
    const line = document.createElement("span");
    line.append(text("em", key), text("span", value));
    return line;
  }));
  const beyond = x + hover.offsetWidth + 24 > width;
  const left = Math.max(0, beyond ? Math.min(x - hover.offsetWidth - 14, width - hover.offsetWidth) : x + 14);
  const top = Math.min(y + 12, Math.max(0, height - hover.offsetHeight));
  hover.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
};
// A click or tap pins what it finds: the tooltip stays until the next.
let pinned = null;
const showHover = () => {
  const at = pinned ?? (drag ? null : pointer);
  if (!pinned) found = at ? sliceAt(at.x, at.y) : null;
  hover.hidden = !at || at.x < gutter;
  if (!hover.hidden) tell(at.x, at.y);
  requestDraw();
};
const pin = (at) => {
  pinned = null;
  found = sliceAt(at.x, at.y);
  pinned = at;
  showHover();
};
const unpin = () => { pinned = null; found = null; };

// ---- from a table to the picture -------------------------------------------------------------

// Shows a stretch of time, and the slice of a lane that begins at `start_ns`, with its tooltip.
const goTo = ({ from_ns, to_ns, lane, start_ns, title }) => {
  unpin();
  const space = Math.max((fold(to_ns) - fold(from_ns)) * 0.6, 10 * VIEW_NS_MIN);
  look(fold(from_ns) - space, fold(to_ns) + space);
  draw();
  const of = lanes[lane];
  if (of) {
    for (let i = above(of.count, (at) => of.start_ns[at], start_ns - 1); i < of.count && of.start_ns[i] === start_ns; i += 1) {
      if (!title || titleOf({ lane: of, i }) === title) { found = { lane: of, i }; break; }
    }
  }
  if (found && itemOf(found.lane)) {
    const box = boxOf(found);
    pinned = { x: Math.max(gutter, Math.min((box.x0 + box.x1) / 2, width - margin)), y: box.centre };
  }
  showHover();
  byId("picture").scrollIntoView({ block: "start", behavior: "smooth" });
};
const numbered = (row, key) => row.dataset[key] === undefined ? undefined : Number(row.dataset[key]);
const follow = (row) => goTo({
  from_ns: numbered(row, "from"), to_ns: numbered(row, "to"), lane: numbered(row, "lane"), start_ns: numbered(row, "start"), title: row.dataset.title,
});
for (const row of document.querySelectorAll("tr[data-from]")) {
  row.tabIndex = 0;
  row.addEventListener("click", () => follow(row));
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") follow(row); });
}

// ---- steps -----------------------------------------------------------------------------------

const strip = byId("steps");
const say = (step, at) =>
  `step ${at + 1} of ${steps.length} · ${duration(step.to - step.from)} · peak ${step.peak === null ? "not recorded" : bytes(step.peak)} · stalled ${duration(step.stall)} (${share(step.stall, step.to - step.from)})`;
const choose = (at) => {
  chosen = Math.min(Math.max(at, 0), steps.length - 1);
  const { from, to } = around(steps[chosen]);
  unpin();
  look(from, to);
  showHover();
  [...strip.children].forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.step) === chosen)));
  strip.children[chosen - hidden]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  byId("step").textContent = say(steps[chosen], chosen);
};
const hidden = Math.max(0, steps.length - STEPS_SHOWN_MAX);
if (steps.length > 0) {
  const longest = Math.max(...steps.map((step) => step.to - step.from)), highest = Math.max(1, ...steps.map((step) => step.peak));
  steps.slice(hidden).forEach((step, offset) => {
    const [button, time, stall, peak] = [document.createElement("button"), ...["time", "stall", "peak"].map((name) => text("i", "", name))];
    const at = hidden + offset;
    button.dataset.step = at;
    button.title = say(step, at);
    button.setAttribute("aria-label", button.title);
    time.style.height = `${Math.max(2, ((step.to - step.from) / longest) * 40)}px`;
    stall.style.height = `${(step.stall / longest) * 40}px`;
    peak.style.bottom = `${(step.peak / highest) * 40}px`;
    peak.hidden = step.peak === null;
    button.append(time, stall, peak);
    button.onclick = () => choose(at);
    strip.append(button);
  });
  byId("strip").hidden = false;
  byId("earlier").onclick = () => choose(chosen - 1);
  byId("later").onclick = () => choose(chosen + 1);
  if (hidden > 0) byId("step").title = `the last ${STEPS_SHOWN_MAX} are shown`;
}

// ---- controls --------------------------------------------------------------------------------

const showLegend = () => {
  const swatch = (look) => {
    const mark = document.createElement("canvas"), brush = mark.getContext("2d");
    [mark.width, mark.height] = [18, 12];
    brush.fillStyle = patternOf(look).fill;
    brush.fillRect(0, 0, 18, 12);
    return mark;
  };
  const entry = (label, look, kind = "") => {
    const item = document.createElement("li");
    item.append(kind === "line" ? text("i", "", kind) : swatch(look), label);
    return item;
  };
  const entries = stack.map(({ title, look }) => entry(title, look));
  entries.push(entry("mapped, with cached and staged", "ink", "line"));
  if (lanes.some((lane) => lane.outbound && lane.rows > 0)) entries.push(entry("copies to sleep", "outbound"));
  if (lanes.some((lane) => lane.copy && !lane.outbound && lane.rows > 0)) entries.push(entry("copies to wake", "inbound"));
  if (lanes[STALL].rows > 0) entries.push(entry("compute waits", "stall"));
  byId("legend").replaceChildren(...entries);
};
const locate = (event) => {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};
// Fingers on the picture, by pointer id. One pans, two pinch.
const fingers = new Map();
const pinch = () => {
  const [a, b] = [...fingers.values()];
  return { centre: (a.x + b.x) / 2, distance: Math.max(8, Math.abs(a.x - b.x)) };
};
const placeAt = (x) => view.from + ((x - gutter) / timeWidth()) * (view.to - view.from);
const moveFingers = (event, now) => {
  if (fingers.size === 2) {
    const before = pinch();
    fingers.set(event.pointerId, now);
    const after = pinch(), factor = before.distance / after.distance;
    const held = placeAt(before.centre), length = (view.to - view.from) * factor;
    const from = held - ((after.centre - gutter) / timeWidth()) * length;
    unpin();
    look(from, from + length);
  } else if (drag) {
    drag.far ||= Math.abs(now.x - drag.x0) > REACH_PX;
    if (drag.far) { unpin(); move((drag.x - now.x) / timeWidth()); }
    drag.x = now.x;
  }
  fingers.set(event.pointerId, now);
  showHover();
};
stage.addEventListener("pointermove", (event) => {
  const now = locate(event);
  if (fingers.has(event.pointerId)) return moveFingers(event, now);
  if (event.pointerType === "touch") return;
  if (drag?.moves) move((drag.x - now.x) / timeWidth());
  if (drag?.moves) drag.x = now.x;
  if (drag && !drag.moves && Math.abs(now.x - drag.x) > REACH_PX) { drag.selects = true; unpin(); }
  pointer = now;
  showHover();
});
stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  const now = locate(event);
  stage.setPointerCapture(event.pointerId);
  drag = { x: now.x, x0: now.x, moves: event.shiftKey };
  if (event.pointerType === "touch") fingers.set(event.pointerId, now);
});
stage.addEventListener("pointerup", (event) => {
  const [at, was, isTouch] = [locate(event), drag, fingers.delete(event.pointerId)];
  drag = null;
  if (isTouch) {
    if (was && !was.far && fingers.size === 0) pin(at);
    return requestDraw();
  }
  if (was?.selects) look(placeAt(Math.min(was.x, at.x)), placeAt(Math.max(was.x, at.x)));
  else if (was && !was.moves) { if (pinned) unpin(); else if (sliceAt(at.x, at.y)) pin(at); }
  showHover();
});
stage.addEventListener("pointercancel", (event) => { fingers.delete(event.pointerId); drag = null; requestDraw(); });
stage.addEventListener("pointerleave", () => { pointer = null; showHover(); });
stage.addEventListener("dblclick", () => { unpin(); look(whole.from, whole.to); });
stage.addEventListener("wheel", (event) => {
  // Without the key the page scrolls, as everywhere else.
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  unpin();
  zoom(event.deltaY > 0 ? ZOOM_STEP : 1 / ZOOM_STEP, placeAt(locate(event).x));
}, { passive: false });
const change = (how) => () => { unpin(); how(); showHover(); };
const keys = {
  w: change(() => zoom(1 / ZOOM_STEP)), s: change(() => zoom(ZOOM_STEP)), a: change(() => move(-0.2)), d: change(() => move(0.2)),
  escape: change(() => {}),
};
stage.addEventListener("keydown", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.altKey) keys[event.key.toLowerCase()]?.();
});
byId("closer").onclick = keys.w;
byId("wider").onclick = keys.s;
byId("all").onclick = change(() => look(whole.from, whole.to));
byId("to-peak").hidden = !data.peak;
byId("to-peak").onclick = change(() => {
  const step = steps.find(({ from, to }) => data.peak.at_ns >= from && data.peak.at_ns <= to);
  const half = step ? (step.to - step.from) / 8 : data.window_ns / 16;
  look(fold(data.peak.at_ns - half), fold(data.peak.at_ns + half));
});

byId("when").textContent = `begins ${new Date(data.begin_unix_ms).toLocaleString()}`;
readColours();
showLegend();
new ResizeObserver(() => requestDraw(true)).observe(stage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); showLegend(); requestDraw(true); });
if (steps.length > 0) choose(steps.length - 1);
draw();
