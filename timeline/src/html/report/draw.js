// What is in view, what lies where, and drawing it. Everything is redrawn on each change: a frame is
// bounded by the pixels, as each row skips to the first slice in view and slices that share a pixel
// are drawn once.

// ---- view ------------------------------------------------------------------------------------

const whole = { from: 0, to: Math.max(data.window_ns, VIEW_NS_MIN) };
const phaseView = () => {
  const { start_ns, duration_ns } = lanes[PHASE];
  if (start_ns.length === 0) return whole;
  const from = start_ns.reduce((a, b) => Math.min(a, b));
  const to = start_ns.reduce((a, b, i) => Math.max(a, b + duration_ns[i]), 0);
  const margin = (to - from) * 0.02;
  return { from: from - margin, to: to + margin };
};
let view = phaseView();
let width = 0, height = 0, colours = {};
const timeWidth = () => Math.max(1, width - GUTTER_PX - MARGIN_PX);
const xOf = (ns) => GUTTER_PX + ((ns - view.from) / (view.to - view.from)) * timeWidth();
const nsOf = (x) => view.from + ((x - GUTTER_PX) / timeWidth()) * (view.to - view.from);
const look = (from, to) => {
  const length = Math.min(Math.max(to - from, VIEW_NS_MIN), whole.to * 1.1);
  const start = Math.min(Math.max((from + to - length) / 2, whole.to * -0.05), whole.to * 1.05 - length);
  view = { from: start, to: start + length };
  requestDraw();
};
const zoom = (factor, centre = (view.from + view.to) / 2) =>
  look(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
const move = (part) => {
  const by = (view.to - view.from) * part;
  look(view.from + by, view.to + by);
};

// ---- layout: what is drawn at which height ---------------------------------------------------

const rowPx = (lane) => lane.rows > 12 ? 5 : lane.rows > 4 ? 7 : 11;
const peakOf = (gauge) => gauge.bytes.reduce((a, b) => Math.max(a, b), 0);
const panels = [
  { title: "device", area: data.gauges[0], line: data.gauges[1], colour: "device" },
  { title: "host", area: data.gauges[2], colour: "host" },
  { title: "nvme", area: data.gauges[3], colour: "nvme" },
].map((panel) => ({
  ...panel,
  peak: peakOf(panel.area),
})).filter((panel) => panel.peak > 0 || panel.colour === "device");
// One scale for all tiers: the bytes that leave one area are those that appear in another.
const scale_bytes = Math.max(1, ...data.gauges.map(peakOf));

const layout = [];
let total_px = AXIS_PX;
const place = (item, height_px) => {
  layout.push({ ...item, top: total_px, height: height_px });
  total_px += height_px + GAP_PX;
};
const placeLane = (lane) => {
  if (lane.rows > 0) place({ kind: "lane", lane }, lane.rows * (rowPx(lane) + 1));
};
if (lanes[PHASE].rows > 0) place({ kind: "phases", lane: lanes[PHASE] }, lanes[PHASE].rows * BAND_PX);
placeLane(lanes[LAYER]);
for (const panel of panels) place({ kind: "panel", panel }, PANEL_PX);
for (const lane of lanes) if (lane.copy) placeLane(lane);
placeLane(lanes[STALL]);
if (lanes.some((lane) => lane.instants.at_ns.length > 0)) place({ kind: "notices" }, 12);
const itemOf = (lane) => layout.find((item) => item.lane === lane);

const colourOf = (lane, i) => {
  if (lane.index === STALL) return colours.stall;
  if (lane.copy) return lane.outbound ? colours.outbound : colours.inbound;
  return i % 2 ? colours.layerNext : colours.layer;
};

// ---- drawing ---------------------------------------------------------------------------------

const readColours = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  colours = {
    layerNext: read("layer-next"),
    bands: Array.from({ length: BANDS }, (_, i) => read(`band-${i}`)),
  };
  for (const name of ["card", "ink", "soft", "line", "grid", "device", "host", "nvme", "outbound", "inbound", "stall", "layer", "notice"]) {
    colours[name] = read(name);
  }
};
const write = (content, x, y, align = "left", colour = colours.soft) => {
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.textBaseline = "middle";
  pen.fillText(content, x, y);
};
// `content` where it fits between two edges, cut short where it does not, else nothing.
const writeWithin = (content, from, to, y) => {
  const room = to - from - 8;
  if (room < 14) return;
  let shown = content;
  while (shown.length > 1 && pen.measureText(shown).width > room) shown = shown.slice(0, Math.floor(shown.length * 0.8));
  if (shown !== content) shown = shown.length > 2 ? `${shown.slice(0, -1)}…` : "";
  write(shown, from + 4, y, "left", colours.ink);
};
// A distance of 1, 2 or 5 times a power of ten (or of two, for bytes) that is at least `least`.
const roundStep = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999);
};

const drawAxis = () => {
  const step = roundStep(((view.to - view.from) / timeWidth()) * 96);
  for (let ns = Math.ceil(view.from / step) * step; ns <= view.to; ns += step) {
    const x = Math.round(xOf(ns)) + 0.5;
    pen.strokeStyle = colours.grid;
    pen.beginPath();
    pen.moveTo(x, AXIS_PX - 7);
    pen.lineTo(x, height);
    pen.stroke();
    if (x < width - MARGIN_PX - 16) write(moment(ns === 0 ? 0 : ns, step), x, 9, "center");
  }
};

// Calls `visit(i, x0, x1)` for the slices of one row that show, those within one pixel once.
const eachSlice = (lane, row, visit) => {
  const indices = lane.slices[row];
  const ticks = lane.crowded && row === lane.rows - 1;
  const key = (at) => lane.start_ns[indices[at]] + (ticks ? 0 : lane.duration_ns[indices[at]]);
  let filled = -1;
  for (let at = above(indices.length, key, view.from - 1); at < indices.length; at += 1) {
    const i = indices[at];
    const start = xOf(lane.start_ns[i]);
    if (start > width - MARGIN_PX) break;
    const end = ticks ? start + 2 : Math.max(start + 1, xOf(lane.start_ns[i] + lane.duration_ns[i]));
    if (end < filled + 0.5) continue;
    filled = Math.ceil(end - 0.001);
    visit(i, Math.max(start, GUTTER_PX), Math.min(end, width - MARGIN_PX));
  }
};

const drawPhases = (item) => {
  for (let row = 0; row < item.lane.rows; row += 1) {
    eachSlice(item.lane, row, (i, x0, x1) => {
      const y = item.top + row * BAND_PX;
      pen.fillStyle = colours.bands[bandOf(item.lane.name[i])];
      pen.globalAlpha = 0.32;
      if (row === 0) pen.fillRect(x0, y, x1 - x0, height - y);
      pen.globalAlpha = 1;
      pen.fillRect(x0, y, Math.max(1, x1 - x0 - 1), BAND_PX - 2);
      writeWithin(data.names[item.lane.name[i]], x0 + 2, x1, y + BAND_PX / 2 - 1);
    });
  }
};

const drawLane = (item) => {
  const { lane } = item;
  const row_px = rowPx(lane);
  write(lane.title, GUTTER_PX - 10, item.top + item.height / 2 - 0.5, "right");
  for (let row = 0; row < lane.rows; row += 1) {
    const y = item.top + row * (row_px + 1);
    eachSlice(lane, row, (i, x0, x1) => {
      pen.fillStyle = colourOf(lane, i);
      pen.fillRect(x0, y, Math.max(1, x1 - x0 - (x1 - x0 > 3 ? 0.6 : 0)), row_px);
    });
  }
};

// Visits the steps in view; those that fall into one pixel as their first, extremes and last.
const eachStep = (gauge, visit) => {
  let at = Math.max(0, above(gauge.at_ns.length, (i) => gauge.at_ns[i], view.from) - 1);
  let pixel = null;
  const flush = () => pixel && visit(pixel.x, [pixel.low, pixel.high, pixel.last]);
  for (; at < gauge.at_ns.length && gauge.at_ns[at] <= view.to; at += 1) {
    const x = Math.max(GUTTER_PX, Math.round(xOf(gauge.at_ns[at]) * 2) / 2);
    const level = gauge.bytes[at];
    if (pixel?.x === x) {
      pixel.low = Math.min(pixel.low, level);
      pixel.high = Math.max(pixel.high, level);
      pixel.last = level;
    } else {
      flush();
      pixel = { x, low: level, high: level, last: level };
    }
  }
  flush();
};
const tracePanel = (item, gauge) => {
  const yOf = (level) => item.top + item.height - (level / scale_bytes) * (item.height - 12);
  let y = null;
  pen.beginPath();
  eachStep(gauge, (x, levels) => {
    if (y === null) pen.moveTo(x, yOf(levels[0])); else pen.lineTo(x, y);
    for (const level of levels) pen.lineTo(x, (y = yOf(level)));
  });
  const end = Math.min(xOf(whole.to), width - MARGIN_PX);
  if (y !== null) pen.lineTo(Math.max(GUTTER_PX, end), y);
  return Math.max(GUTTER_PX, end);
};
const drawPanel = (item) => {
  const { panel } = item;
  const base = item.top + item.height;
  const step = 2 ** Math.ceil(Math.log2(scale_bytes / 4));
  for (let level = step; level <= scale_bytes; level += step) {
    const y = Math.round(base - (level / scale_bytes) * (item.height - 12)) + 0.5;
    pen.strokeStyle = colours.grid;
    pen.beginPath();
    pen.moveTo(GUTTER_PX, y);
    pen.lineTo(width - MARGIN_PX, y);
    pen.stroke();
    write(bytes(level).replace(/\.0+ /, " "), GUTTER_PX - 10, y, "right");
  }
  write(panel.title, 0, item.top + 12, "left", colours.ink);
  write(`peak ${bytes(panel.peak)}`, 0, item.top + 28);
  const end = tracePanel(item, panel.area);
  pen.strokeStyle = colours[panel.colour];
  pen.lineWidth = 1.4;
  pen.stroke();
  pen.lineTo(end, base);
  pen.lineTo(Math.max(GUTTER_PX, xOf(0)), base);
  pen.globalAlpha = 0.28;
  pen.fillStyle = colours[panel.colour];
  pen.fill();
  pen.globalAlpha = 1;
  if (panel.line) {
    tracePanel(item, panel.line);
    pen.setLineDash([4, 3]);
    pen.lineWidth = 1;
    pen.stroke();
    pen.setLineDash([]);
  }
  pen.lineWidth = 1;
  pen.strokeStyle = colours.line;
  pen.beginPath();
  pen.moveTo(GUTTER_PX, base + 0.5);
  pen.lineTo(width - MARGIN_PX, base + 0.5);
  pen.stroke();
};

const drawNotices = (item) => {
  write("notices", GUTTER_PX - 10, item.top + 6, "right");
  pen.fillStyle = colours.notice;
  for (const { instants } of lanes) {
    let filled = -1;
    for (const ns of instants.at_ns) {
      const x = Math.round(xOf(ns));
      if (x < GUTTER_PX || x > width - MARGIN_PX || x === filled) continue;
      filled = x;
      pen.beginPath();
      pen.moveTo(x, item.top); pen.lineTo(x + 5, item.top + 6); pen.lineTo(x, item.top + 12); pen.lineTo(x - 5, item.top + 6);
      pen.fill();
    }
  }
};

const centreOf = ({ lane, i }) => {
  const row_px = rowPx(lane);
  return itemOf(lane).top + Math.min(lane.row[i], lane.rows - 1) * (row_px + 1) + row_px / 2;
};
// The copies of the hovered region around the hovered one, joined in order of time.
const drawJourney = (found) => {
  const journey = journeys[found.lane.region[found.i]];
  if (!journey || journey.length < 2) return;
  const here = journey.findIndex(({ lane, i }) => lane === found.lane && i === found.i);
  const near = journey.slice(Math.max(0, here - JOURNEY_LEGS_MAX), here + JOURNEY_LEGS_MAX);
  const drawn = near.filter(({ lane }) => itemOf(lane)?.kind === "lane");
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1.5;
  drawn.forEach((leg, at) => {
    const [x0, x1] = [xOf(began(leg)), xOf(ended(leg))];
    const row_px = rowPx(leg.lane);
    pen.strokeRect(x0 - 1, centreOf(leg) - row_px / 2 - 1, Math.max(3, x1 - x0 + 2), row_px + 2);
    if (at === 0) return;
    const before = drawn[at - 1];
    const [from, y0, y1] = [xOf(ended(before)), centreOf(before), centreOf(leg)];
    const bend = Math.max(12, Math.abs(x0 - from) / 3);
    pen.beginPath();
    pen.moveTo(from, y0);
    pen.bezierCurveTo(from + bend, y0, x0 - bend, y1, x0, y1);
    pen.stroke();
  });
  pen.lineWidth = 1;
};

let pointer = null, drag = null, found = null, requested = false;
const draw = () => {
  requested = false;
  const ratio = window.devicePixelRatio || 1;
  width = stage.clientWidth;
  height = total_px;
  const [pixels_x, pixels_y] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels_x || canvas.height !== pixels_y) {
    canvas.width = pixels_x;
    canvas.height = pixels_y;
    canvas.style.height = `${height}px`;
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  // The grid lies under everything, the bands over it, the rest over both.
  drawAxis();
  for (const item of layout) if (item.kind === "phases") drawPhases(item);
  for (const item of layout) {
    if (item.kind === "phases") write("phases", GUTTER_PX - 10, item.top + item.height / 2 - 1, "right");
    if (item.kind === "lane") drawLane(item);
    if (item.kind === "panel") drawPanel(item);
    if (item.kind === "notices") drawNotices(item);
  }
  if (found) {
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER_PX, 0, width - GUTTER_PX - MARGIN_PX + 4, height);
    pen.clip();
    drawJourney(found);
    pen.restore();
  }
  if (drag && !drag.moves && pointer) {
    pen.fillStyle = colours.soft;
    pen.globalAlpha = 0.2;
    pen.fillRect(drag.x, 0, pointer.x - drag.x, height);
    pen.globalAlpha = 1;
  }
  if (pointer && pointer.x >= GUTTER_PX) {
    pen.fillStyle = colours.soft;
    pen.fillRect(Math.round(pointer.x), AXIS_PX - 7, 1, height);
  }
};
const requestDraw = () => {
  if (!requested) requestAnimationFrame(draw);
  requested = true;
};
