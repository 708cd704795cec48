// What is in view, what lies where, and drawing it. A view is drawn once, aside; what the pointer adds is drawn
// over it. Drawing is bounded by the pixels: each row skips to the first slice in view, and slices that share
// a pixel are drawn once.

const [stage, canvas, hover] = ["stage", "canvas", "hover"].map(byId);
const pen = canvas.getContext("2d");
const scene = document.createElement("canvas");
const paint = scene.getContext("2d");

const AXIS_PX = 26, GAP_PX = 9, TITLE_PX = 15, NARROW_PX = 640;
const BAND_PX = 24, DEVICE_PX = 190, TIER_PX_MIN = 34, BANDS = 6;
const VIEW_NS_MIN = 1000, ZOOM_STEP = 1.5, REACH_PX = 4, JOURNEY_LEGS_MAX = 64;
const FONT = "11.5px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

// ---- view ------------------------------------------------------------------------------------

const whole = { from: 0, to: Math.max(fold(data.window_ns), VIEW_NS_MIN) };
const around = ({ from, to }) => {
  const margin = (fold(to) - fold(from)) * 0.02;
  return { from: fold(from) - margin, to: fold(to) + margin };
};
let chosen = steps.length - 1;
let view = steps.length > 0 ? around(steps[chosen]) : { ...whole };
let width = 0, height = 0, gutter = 0, margin = 0, colours = {};
const isNarrow = () => width < NARROW_PX;
const timeWidth = () => Math.max(1, width - gutter - margin);
const xOf = (ns) => gutter + ((fold(ns) - view.from) / (view.to - view.from)) * timeWidth();
const nsOf = (x) => unfold(view.from + ((x - gutter) / timeWidth()) * (view.to - view.from));
const look = (from, to) => {
  const length = Math.min(Math.max(to - from, VIEW_NS_MIN), whole.to * 1.1);
  const start = Math.min(Math.max((from + to - length) / 2, whole.to * -0.05), whole.to * 1.05 - length);
  view = { from: start, to: start + length };
  requestDraw(true);
};
const zoom = (factor, centre = (view.from + view.to) / 2) =>
  look(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
const move = (part) => {
  const by = (view.to - view.from) * part;
  look(view.from + by, view.to + by);
};

// ---- layout: what is drawn at which height ---------------------------------------------------

const rowPx = (lane) => lane.rows > 12 ? 5 : lane.rows > 4 ? 8 : 14;
const peakOf = (level) => level.bytes.reduce((a, b) => Math.max(a, b), 0);
const awake = data.tier("awake"), mapped = data.tier("mapped");
const stack = layersOf(data);
const tiers = [
  { title: "host", area: data.tier("host"), look: "host" },
  { title: "NVMe", area: data.tier("nvme"), look: "nvme" },
].map((tier) => ({ ...tier, peak: peakOf(tier.area) })).filter((tier) => tier.peak > 0);
// One scale for all tiers: the bytes that leave one area are those that appear in another.
const device_peak = Math.max(peakOf(awake), peakOf(mapped), 1);
const scale_bytes = Math.max(device_peak, ...tiers.map((tier) => tier.peak));
const pixelsPerByte = (DEVICE_PX - 34) / scale_bytes;

let layout = [], total_px = 0;
const arrange = () => {
  layout = [];
  total_px = AXIS_PX;
  const place = (item, height_px) => {
    if (isNarrow()) total_px += TITLE_PX;
    layout.push({ ...item, top: total_px, height: height_px });
    total_px += height_px + GAP_PX;
  };
  const placeLane = (lane) => {
    if (lane.rows > 0) place({ kind: "lane", lane, title: lane.title }, lane.rows * (rowPx(lane) + 1));
  };
  if (lanes[PHASE].rows > 0) place({ kind: "phases", lane: lanes[PHASE], title: "phases" }, lanes[PHASE].rows * BAND_PX);
  placeLane(lanes[MICROBATCH]);
  placeLane(lanes[LAYER]);
  place({ kind: "device", title: "device" }, device_peak * pixelsPerByte + 34);
  for (const tier of tiers) place({ kind: "tier", tier, title: tier.title }, Math.max(TIER_PX_MIN, tier.peak * pixelsPerByte + 14));
  placeLane(lanes[STALL]);
  for (const lane of lanes) if (lane.copy) placeLane(lane);
  if (lanes[7].instants.at_ns.length > 0) place({ kind: "notices", title: "notices" }, 12);
};
const itemOf = (lane) => layout.find((item) => item.lane === lane);
const bandOf = (name) => Math.max(0, data.phaseNames.indexOf(data.names[name])) % BANDS;

// ---- drawing ---------------------------------------------------------------------------------

const LOOKS = [
  "boundary", "accumulators", "dormant", "tag-0", "tag-1", "tag-2", "other", "host", "nvme", "outbound", "inbound", "stall",
  "layer", "layer-next", "notice", "card", "ink", "soft", "line", "grid", "hatch", "peak",
];
const readColours = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  colours = { bands: Array.from({ length: BANDS }, (_, i) => read(`band-${i}`)) };
  for (const name of LOOKS) colours[name] = read(name);
  patterns = {};
};
const write = (content, x, y, align = "left", colour = colours.soft) => {
  paint.fillStyle = colour;
  paint.textAlign = align;
  paint.textBaseline = "middle";
  paint.fillText(content, x, y);
};
// `content` where it fits between two edges, cut short where it does not, else nothing.
const writeWithin = (content, from, to, y) => {
  const room = to - from - 8;
  if (room < 14) return;
  let shown = content;
  while (shown.length > 1 && paint.measureText(shown).width > room) shown = shown.slice(0, Math.floor(shown.length * 0.8));
  if (shown !== content) shown = shown.length > 2 ? `${shown.slice(0, -1)}…` : "";
  write(shown, from + 4, y, "left", colours.ink);
};
// The name of an item: beside it, or on a narrow page above it. Of a tier, its peak too.
const writeTitle = (item) => {
  const peak = item.kind === "device" ? data.peak?.bytes ?? 0 : item.tier?.peak;
  if (isNarrow()) return write(peak === undefined ? item.title : `${item.title} · peak ${bytes(peak)}`, gutter, item.top - TITLE_PX / 2);
  if (peak === undefined) return write(item.title, gutter - 10, item.top + item.height / 2 - 0.5, "right");
  const top = item.top + (item.kind === "device" ? 18 : 8);
  write(item.title, 0, top, "left", colours.ink);
  write(`peak ${bytes(peak)}`, 0, top + 16);
};
// A distance of 1, 2 or 5 times a power of ten that is at least `least`.
const roundStep = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999);
};
const line = (target, x0, y0, x1, y1) => {
  target.beginPath();
  target.moveTo(x0, y0);
  target.lineTo(x1, y1);
  target.stroke();
};

const drawAxis = () => {
  const step = roundStep(((view.to - view.from) / timeWidth()) * 96);
  const to = nsOf(width - margin);
  let written = -Infinity;
  for (let ns = Math.ceil(nsOf(gutter) / step) * step; ns <= to; ns += step) {
    const gap = folds.find((gap) => ns > gap.from && ns < gap.to);
    if (gap) { ns = Math.max(ns, Math.floor(gap.to / step) * step - step); if (ns + step <= gap.to) continue; ns = Math.ceil(gap.to / step) * step; }
    const x = Math.round(xOf(ns)) + 0.5;
    if (x > width - margin) break;
    paint.strokeStyle = colours.grid;
    line(paint, x, AXIS_PX - 7, x, height);
    if (x < width - margin - 16 && x > written + 64) {
      write(moment(ns === 0 ? 0 : ns, step), Math.max(x, gutter + 12), 9, "center");
      written = x;
    }
  }
};
// A fold is a blank stretch between two torn edges.
const drawFolds = () => {
  for (const gap of folds) {
    const [x0, x1] = [xOf(gap.from), xOf(gap.to)];
    if (x1 < gutter || x0 > width - margin) continue;
    paint.fillStyle = colours.card;
    paint.fillRect(Math.max(gutter, x0 + 1), AXIS_PX - 4, Math.min(x1, width - margin) - Math.max(gutter, x0 + 1), height);
    paint.strokeStyle = colours.soft;
    paint.setLineDash([2, 4]);
    for (const x of [x0, x1]) if (x > gutter && x < width - margin) line(paint, x, AXIS_PX - 4, x, height);
    paint.setLineDash([]);
    const label = `⋯ ${duration(gap.to - gap.from)}`;
    const middle = (x0 + x1) / 2;
    if (middle > gutter + 20 && middle < width - margin - 20) {
      paint.save();
      paint.translate(middle, height / 2);
      paint.rotate(-Math.PI / 2);
      if (x1 - x0 > 12) write(label, 0, 0, "center");
      paint.restore();
    }
  }
};

// Calls `visit(i, x0, x1)` for the slices of one row that show, those within one pixel once.
const eachSlice = (lane, row, visit) => {
  const indices = lane.slices[row], from = nsOf(gutter);
  const ticks = lane.crowded && row === lane.rows - 1;
  const key = (at) => lane.start_ns[indices[at]] + (ticks ? 0 : lane.duration_ns[indices[at]]);
  let filled = -1;
  for (let at = above(indices.length, key, from - 1); at < indices.length; at += 1) {
    const i = indices[at];
    const start = xOf(lane.start_ns[i]);
    if (start > width - margin) break;
    const end = ticks ? start + 2 : Math.max(start + 1, xOf(lane.start_ns[i] + lane.duration_ns[i]));
    if (end < filled + 0.5) continue;
    filled = Math.ceil(end - 0.001);
    visit(i, Math.max(start, gutter), Math.min(end, width - margin));
  }
};

const drawPhases = (item) => {
  for (let row = 0; row < item.lane.rows; row += 1) {
    eachSlice(item.lane, row, (i, x0, x1) => {
      const y = item.top + row * BAND_PX;
      paint.fillStyle = colours.bands[bandOf(item.lane.name[i])];
      paint.globalAlpha = 0.32;
      if (row === 0) paint.fillRect(x0, y, x1 - x0, height - y);
      paint.globalAlpha = 1;
      paint.fillRect(x0, y, Math.max(1, x1 - x0 - 1), BAND_PX - 2);
      writeWithin(data.names[item.lane.name[i]], x0 + 2, x1, y + BAND_PX / 2 - 1);
    });
  }
};
const fillOf = (lane, i) => {
  if (lane.index === STALL) return patternOf("stall").fill;
  if (lane.copy) return lane.outbound ? colours.outbound : colours.inbound;
  return i % 2 ? colours["layer-next"] : colours.layer;
};
const drawLane = (item) => {
  const { lane } = item;
  const row_px = rowPx(lane);
  for (let row = 0; row < lane.rows; row += 1) {
    const y = item.top + row * (row_px + 1);
    eachSlice(lane, row, (i, x0, x1) => {
      const [left, wide] = [x0, Math.max(1, x1 - x0 - (x1 - x0 > 3 ? 0.6 : 0))];
      paint.fillStyle = fillOf(lane, i);
      paint.fillRect(left, y, wide, row_px);
      if (row_px < 14 || wide < 24) return;
      const title = titleOf({ lane, i }), number = lane.layer[i] - 1;
      const short = number < 0 ? title : lane.index === MICROBATCH ? String(number) : `L${number}`;
      const content = paint.measureText(title).width < wide - 6 ? title : short;
      if (paint.measureText(content).width >= wide - 4) return;
      const ink = lane.copy || lane.index === STALL ? colours.card : colours.ink;
      if (lane.index === STALL) { paint.fillStyle = colours.stall; paint.fillRect(left, y, paint.measureText(content).width + 6, row_px); }
      write(content, left + 3, y + row_px / 2 + 0.5, "left", ink);
    });
  }
};

// Visits the steps in view; those that fall into one pixel as their first, extremes and last.
const eachStep = (level, visit) => {
  const to = nsOf(width - margin);
  let at = Math.max(0, above(level.at_ns.length, (i) => level.at_ns[i], nsOf(gutter)) - 1);
  let pixel = null;
  const flush = () => pixel && visit(pixel.x, [pixel.low, pixel.high, pixel.last]);
  for (; at < level.at_ns.length && level.at_ns[at] <= to; at += 1) {
    const x = Math.max(gutter, Math.round(xOf(level.at_ns[at]) * 2) / 2);
    const value = level.bytes[at];
    if (pixel?.x === x) {
      pixel.low = Math.min(pixel.low, value);
      pixel.high = Math.max(pixel.high, value);
      pixel.last = value;
    } else {
      flush();
      pixel = { x, low: value, high: value, last: value };
    }
  }
  flush();
};
const trace = (base, level) => {
  let y = null;
  paint.beginPath();
  eachStep(level, (x, values) => {
    if (y === null) paint.moveTo(x, base - values[0] * pixelsPerByte); else paint.lineTo(x, y);
    for (const value of values) paint.lineTo(x, (y = base - value * pixelsPerByte));
  });
  const end = Math.max(gutter, Math.min(xOf(data.window_ns), width - margin));
  if (y !== null) paint.lineTo(end, y);
  return end;
};
const drawScale = (item, base, most) => {
  const step = 2 ** Math.ceil(Math.log2(most / (most * pixelsPerByte < 80 ? 1 : 4)));
  for (let level = step; level <= most * 1.001; level += step) {
    const y = Math.round(base - level * pixelsPerByte) + 0.5;
    paint.strokeStyle = colours.grid;
    line(paint, gutter, y, width - margin, y);
    if (!isNarrow()) write(bytes(level).replace(/\.0+ /, " "), gutter - 10, y, "right");
    else write(bytes(level).replace(/\.0+ /, " "), width - margin, y - 6, "right");
  }
};
const drawBase = (base) => {
  paint.strokeStyle = colours.line;
  line(paint, gutter, base + 0.5, width - margin, base + 0.5);
};
// Where levels are not recorded, the area says so.
const drawUnrecorded = (item) => {
  const [x0, x1] = [Math.max(gutter, xOf(0)), Math.min(xOf(data.levels_from_ns), width - margin)];
  if (data.levels_from_ns === 0 || x1 <= x0) return;
  paint.strokeStyle = colours.soft;
  paint.setLineDash([2, 4]);
  paint.strokeRect(x0, item.top + 24, x1 - x0, item.height - 24);
  paint.setLineDash([]);
  writeWithin("not recorded", x0, x1, item.top + item.height / 2);
};
const drawDevice = (item) => {
  const base = item.top + item.height;
  const left = gutter, count = Math.floor(timeWidth());
  const end = Math.min(count, Math.max(0, Math.floor(xOf(data.window_ns) - left)));
  const from = Math.min(end, Math.max(0, Math.floor(xOf(0) - left)));
  if (end > from) {
    const columns = columnsOf(data, stack, end - from, (column) => nsOf(left + from + column));
    paintStack(paint, stack, columns, left + from, base, pixelsPerByte);
    drawScale(item, base, device_peak);
    labelStack(paint, stack, columns, left + from, base, pixelsPerByte);
  }
  drawUnrecorded(item);
  trace(base, mapped);
  paint.strokeStyle = colours.ink;
  paint.setLineDash([4, 3]);
  paint.globalAlpha = 0.7;
  paint.stroke();
  paint.globalAlpha = 1;
  paint.setLineDash([]);
  const budget_y = base - data.budget_bytes * pixelsPerByte;
  if (data.budget_bytes > 0 && budget_y > item.top) {
    paint.strokeStyle = colours.peak;
    line(paint, gutter, budget_y, width - margin, budget_y);
    write(`budget ${bytes(data.budget_bytes)}`, width - margin - 4, budget_y - 8, "right", colours.peak);
  }
  drawBase(base);
};
const drawPeak = (item) => {
  if (!data.peak) return;
  const x = xOf(data.peak.at_ns);
  if (x < gutter || x > width - margin) return;
  const base = item.top + item.height, y = base - data.peak.bytes * pixelsPerByte;
  paint.strokeStyle = paint.fillStyle = colours.peak;
  paint.lineWidth = 1.5;
  line(paint, x, item.top + 20, x, base);
  paint.beginPath();
  paint.arc(x, y, 4, 0, 7);
  paint.fill();
  paint.lineWidth = 1;
  const size = `peak ${bytes(data.peak.bytes)}`, at_time = `t = ${duration(data.peak.at_ns)}`;
  const places = data.peak.place ? data.peak.place.split(", ") : [];
  const short = places.map((part) => part.replace(/^phase ([^:]*):.*/, "$1"));
  const wordings = [[size, ...places, at_time], [size, ...short, at_time], [size, ...short], [size]].map((words) => words.join(", "));
  paint.font = `600 ${FONT}`;
  const content = wordings.find((words) => paint.measureText(words).width + 12 < timeWidth()) ?? size;
  const wide = paint.measureText(content).width + 12;
  const at = Math.max(gutter, Math.min(x - wide / 2, width - margin - wide));
  paint.beginPath();
  paint.roundRect(at, item.top, wide, 20, 4);
  paint.fillStyle = colours.peak;
  paint.fill();
  write(content, at + 6, item.top + 10.5, "left", colours.card);
  paint.font = FONT;
};
const drawTier = (item) => {
  const { tier } = item;
  const base = item.top + item.height;
  drawScale(item, base, tier.peak);
  const end = trace(base, tier.area);
  paint.strokeStyle = colours[tier.look];
  paint.lineWidth = 1.4;
  paint.stroke();
  paint.lineWidth = 1;
  paint.lineTo(end, base);
  paint.lineTo(Math.max(gutter, xOf(data.levels_from_ns)), base);
  paint.globalAlpha = 0.28;
  paint.fillStyle = colours[tier.look];
  paint.fill();
  paint.globalAlpha = 1;
  drawBase(base);
};
const diamond = (x, y) => {
  paint.beginPath();
  paint.moveTo(x, y); paint.lineTo(x + 5, y + 6); paint.lineTo(x, y + 12); paint.lineTo(x - 5, y + 6);
  paint.fill();
};
const drawNotices = (item) => {
  paint.fillStyle = colours.notice;
  let filled = -1;
  for (const ns of lanes[7].instants.at_ns) {
    const x = Math.round(xOf(ns));
    if (x < gutter || x > width - margin || x === filled) continue;
    filled = x;
    diamond(x, item.top);
  }
};

// ---- the copies of one region ----------------------------------------------------------------

const journeyOf = (region) => {
  const legs = [];
  for (const lane of lanes) {
    if (!lane.copy) continue;
    for (let i = 0; i < lane.count; i += 1) if (lane.region[i] === region) legs.push({ lane, i });
  }
  return legs.sort((a, b) => began(a) - began(b));
};
const boxOf = (leg) => {
  const row_px = leg.lane.index === PHASE ? BAND_PX - 1 : rowPx(leg.lane);
  const top = itemOf(leg.lane).top + Math.min(leg.lane.row[leg.i], leg.lane.rows - 1) * (row_px + 1);
  return { x0: xOf(began(leg)), x1: xOf(ended(leg)), top, row_px, centre: top + row_px / 2 };
};
// The copies of the found region around the found one, joined in order of time.
let journey = { region: 0, legs: [] };
const drawJourney = (found) => {
  const region = found.lane.region[found.i];
  if (journey.region !== region) journey = { region, legs: region > 0 ? journeyOf(region) : [] };
  const here = journey.legs.findIndex(({ lane, i }) => lane === found.lane && i === found.i);
  const near = here < 0 ? [found] : journey.legs.slice(Math.max(0, here - JOURNEY_LEGS_MAX), here + JOURNEY_LEGS_MAX);
  pen.strokeStyle = colours.ink;
  pen.lineWidth = 1.5;
  let before = null;
  for (const leg of near) {
    const box = boxOf(leg);
    pen.strokeRect(box.x0 - 1, box.top - 1, Math.max(3, box.x1 - box.x0 + 2), box.row_px + 2);
    if (before) {
      const bend = Math.max(12, Math.abs(box.x0 - before.x1) / 3);
      pen.beginPath();
      pen.moveTo(before.x1, before.centre);
      pen.bezierCurveTo(before.x1 + bend, before.centre, box.x0 - bend, box.centre, box.x0, box.centre);
      pen.stroke();
    }
    before = box;
  }
  pen.lineWidth = 1;
};

let pointer = null, drag = null, found = null, requested = false, isStale = true;
const fit = (target) => {
  const ratio = window.devicePixelRatio || 1;
  const [pixels_x, pixels_y] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (target.width !== pixels_x || target.height !== pixels_y) { target.width = pixels_x; target.height = pixels_y; }
  target.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
};
const drawScene = () => {
  width = stage.clientWidth;
  [gutter, margin] = isNarrow() ? [4, 4] : [152, 14];
  arrange();
  height = total_px;
  fit(scene);
  fit(canvas);
  canvas.style.height = `${height}px`;
  paint.clearRect(0, 0, width, height);
  paint.font = FONT;
  // The grid lies under everything, the bands over it, the rest over both.
  drawAxis();
  for (const item of layout) if (item.kind === "phases") drawPhases(item);
  for (const item of layout) {
    if (item.kind === "lane") drawLane(item);
    if (item.kind === "device") drawDevice(item);
    if (item.kind === "tier") drawTier(item);
    if (item.kind === "notices") drawNotices(item);
  }
  drawFolds();
  layout.forEach(writeTitle);
  for (const item of layout) if (item.kind === "device") drawPeak(item);
  isStale = false;
};
const draw = () => {
  requested = false;
  if (isStale || stage.clientWidth !== width) drawScene();
  pen.clearRect(0, 0, width, height);
  pen.drawImage(scene, 0, 0, width, height);
  if (found && itemOf(found.lane)) {
    pen.save();
    pen.beginPath();
    pen.rect(gutter - 1, 0, width - gutter - margin + 4, height);
    pen.clip();
    drawJourney(found);
    pen.restore();
  }
  if (drag?.selects && pointer) {
    pen.fillStyle = colours.soft;
    pen.globalAlpha = 0.2;
    pen.fillRect(drag.x, 0, pointer.x - drag.x, height);
    pen.globalAlpha = 1;
  }
  if (pointer && pointer.x >= gutter) {
    pen.fillStyle = colours.soft;
    pen.fillRect(Math.round(pointer.x), AXIS_PX - 7, 1, height);
  }
};
const requestDraw = (stale = false) => {
  isStale ||= stale;
  if (!requested) requestAnimationFrame(draw);
  requested = true;
};
