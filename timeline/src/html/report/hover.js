// What the pointer and the keys do.

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
  const near = [];
  for (const { instants } of lanes) {
    instants.at_ns.forEach((ns, i) => {
      if (near.length < 5 && Math.abs(xOf(ns) - x) <= REACH_PX + 2) near.push([data.names[instants.name[i]], String(instants.value[i])]);
    });
  }
  return near;
};
const describe = ({ lane, i }) => {
  const [ns, moved] = [lane.duration_ns[i], lane.bytes[i]];
  const lines = [["lasted", duration(ns)]];
  if (moved > 0) lines.push(["moved", bytes(moved)]);
  if (moved > 0 && ns > 0) lines.push(["rate", `${bytes((moved / ns) * 1e9)}/s`]);
  if (lane.region[i] > 0) lines.push(["region", data.regions[lane.region[i]]]);
  return { title: `${lane.title}: ${data.names[lane.name[i]]}`, lines };
};
const showHover = () => {
  found = pointer && !drag ? sliceAt(pointer.x, pointer.y) : null;
  hover.hidden = !pointer || pointer.x < GUTTER_PX;
  requestDraw();
  if (hover.hidden) return;
  const ns = nsOf(pointer.x);
  const step = ((view.to - view.from) / timeWidth()) * 2;
  const lines = [["at", moment(ns, step > 0 ? 10 ** Math.floor(Math.log10(step)) : 1)]];
  let title = "";
  if (found) {
    const said = describe(found);
    title = said.title;
    lines.push(...said.lines);
  } else {
    lines.push(...noticesAt(pointer.x, pointer.y));
    for (const gauge of data.gauges) if (gauge.bytes.some((level) => level > 0)) lines.push([gauge.title, bytes(levelAt(gauge, ns))]);
  }
  hover.replaceChildren(...(title ? [text("b", title)] : []), ...lines.map(([key, value]) => {
    const line = document.createElement("span");
    line.append(text("em", key), text("span", value));
    return line;
  }));
  const left = pointer.x + hover.offsetWidth + 24 > width ? pointer.x - hover.offsetWidth - 14 : pointer.x + 14;
  const top = Math.min(pointer.y + 12, Math.max(0, height - hover.offsetHeight));
  hover.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
};

// ---- controls --------------------------------------------------------------------------------

const showLegend = () => {
  const entries = [["device awake", "device"], ["device mapped", "device", "line"]];
  for (const panel of panels.slice(1)) entries.push([`${panel.title} used`, panel.colour]);
  if (lanes.some((lane) => lane.outbound && lane.rows > 0)) entries.push(["copies to sleep", "outbound"]);
  if (lanes.some((lane) => lane.copy && !lane.outbound && lane.rows > 0)) entries.push(["copies to wake", "inbound"]);
  if (lanes[STALL].rows > 0) entries.push(["compute stalled", "stall"]);
  const entry = (label, colour, kind) => {
    const [line, mark] = [document.createElement("li"), document.createElement("i")];
    if (kind) mark.className = kind;
    mark.style[kind ? "borderColor" : "background"] = `var(--${colour})`;
    line.append(mark, label);
    return line;
  };
  const bands = phaseNames.slice(0, BANDS).map((name, i) => entry(name, `band-${i}`));
  byId("legend").replaceChildren(...bands, ...entries.map((parts) => entry(...parts)));
};
const locate = (event) => {
  const box = canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};
stage.addEventListener("pointermove", (event) => {
  const now = locate(event);
  if (drag?.moves) move((drag.x - now.x) / timeWidth());
  if (drag?.moves) drag.x = now.x;
  pointer = now;
  showHover();
});
stage.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  stage.setPointerCapture(event.pointerId);
  drag = { x: locate(event).x, moves: event.shiftKey };
});
stage.addEventListener("pointerup", (event) => {
  const [from, to] = [drag?.x, locate(event).x];
  const selects = drag && !drag.moves && Math.abs(to - from) > REACH_PX;
  drag = null;
  if (selects) look(nsOf(Math.min(from, to)), nsOf(Math.max(from, to)));
  requestDraw();
});
stage.addEventListener("pointercancel", () => { drag = null; requestDraw(); });
stage.addEventListener("pointerleave", () => { pointer = null; showHover(); });
stage.addEventListener("dblclick", () => look(whole.from, whole.to));
stage.addEventListener("wheel", (event) => {
  // Without the key the page scrolls, as everywhere else.
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  zoom(event.deltaY > 0 ? ZOOM_STEP : 1 / ZOOM_STEP, nsOf(locate(event).x));
}, { passive: false });
const keys = { w: () => zoom(1 / ZOOM_STEP), s: () => zoom(ZOOM_STEP), a: () => move(-0.2), d: () => move(0.2) };
stage.addEventListener("keydown", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.altKey) keys[event.key.toLowerCase()]?.();
});
byId("closer").onclick = keys.w;
byId("wider").onclick = keys.s;
byId("all").onclick = () => look(whole.from, whole.to);
byId("phases").onclick = () => { const { from, to } = phaseView(); look(from, to); };

byId("when").textContent = `begins ${new Date(data.begin_unix_ms).toLocaleString()}`;
readColours();
showLegend();
new ResizeObserver(requestDraw).observe(stage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); requestDraw(); });
draw();
