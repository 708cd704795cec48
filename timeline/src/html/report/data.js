"use strict";
// The page's data made ready for drawing, and how its numbers are written.
// The three scripts of the page run one behind the other in one scope: data, draw, hover.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const [stage, canvas, hover] = ["stage", "canvas", "hover"].map(byId);
const pen = canvas.getContext("2d");

const GUTTER_PX = 152, MARGIN_PX = 14, AXIS_PX = 26, GAP_PX = 9;
const BAND_PX = 24, PANEL_PX = 104, BANDS = 6;
const VIEW_NS_MIN = 1000, ZOOM_STEP = 1.5, REACH_PX = 4, JOURNEY_LEGS_MAX = 64;
const PHASE = 0, LAYER = 1, STALL = 2;

// ---- data ------------------------------------------------------------------------------------

// Slices of each row in order of their starts; rows hold no overlap, so their ends are in order
// too. The last row of a crowded lane is the exception: it is drawn as ticks at the starts.
const lanes = data.lanes.map((lane, index) => {
  const rows = Array.from({ length: lane.rows }, () => []);
  lane.row.forEach((row, i) => rows[Math.min(row, lane.rows - 1)].push(i));
  return { ...lane, index, slices: rows };
});
const journeys = data.regions.map(() => []);
for (const lane of lanes) {
  lane.region.forEach((region, i) => region > 0 && journeys[region].push({ lane, i }));
}
const began = ({ lane, i }) => lane.start_ns[i];
const ended = ({ lane, i }) => lane.start_ns[i] + lane.duration_ns[i];
for (const journey of journeys) journey.sort((a, b) => began(a) - began(b));
const phaseNames = data.totals.phases.map((phase) => phase.name);
const bandOf = (name) => Math.max(0, phaseNames.indexOf(data.names[name])) % BANDS;

// First index whose key is above `value`, or the length.
const above = (length, key, value) => {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(middle) > value) high = middle; else low = middle + 1;
  }
  return low;
};
const levelAt = (gauge, ns) => {
  const at = above(gauge.at_ns.length, (i) => gauge.at_ns[i], ns) - 1;
  return gauge.bytes[Math.max(0, at)] ?? 0;
};

// ---- formats ---------------------------------------------------------------------------------

const scaled = (value, step, units) => {
  let at = 0;
  while (value >= Math.min(step, 999.5) && at + 1 < units.length) { value /= step; at += 1; }
  const decimals = at === 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${value.toFixed(decimals)} ${units[at]}`;
};
const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const duration = (ns) => ns === 0 ? "0 s" : scaled(ns, 1000, ["ns", "µs", "ms", "s"]);
// A moment on the axis, with as many decimals as the distance between ticks asks for.
const moment = (ns, step_ns) => {
  const [unit, unit_ns] =
    step_ns >= 1e8 ? ["s", 1e9] : step_ns >= 1e5 ? ["ms", 1e6] : step_ns >= 100 ? ["µs", 1e3] : ["ns", 1];
  const decimals = Math.max(0, Math.ceil(-Math.log10(step_ns / unit_ns) - 1e-9));
  return `${(ns / unit_ns).toFixed(decimals)} ${unit}`;
};
const text = (tag, content) => {
  const element = document.createElement(tag);
  element.textContent = content;
  return element;
};
