"use strict";
// A dump made ready for drawing, and how its numbers are written.
// The scripts of the page run one behind the other in one scope: data, steps, stack, draw, hover, compare.

const byId = (id) => document.getElementById(id);
const PHASE = 0, LAYER = 1, STALL = 2, MICROBATCH = 8;

// ---- data ------------------------------------------------------------------------------------

// Columns that are all zeros are left out; times and levels are written as differences.
const column = (values, count) => values.length === 0 ? new Float64Array(count) : Float64Array.from(values);
const sums = (differences) => {
  const values = new Float64Array(differences.length);
  let total = 0;
  for (let i = 0; i < values.length; i += 1) values[i] = total += differences[i];
  return values;
};
const readLane = (lane, index, raw) => {
  const start_ns = sums(lane.start_ns), count = start_ns.length;
  const read = (name) => column(lane[name], count);
  const row = read("row"), size = read("size");
  const bytes = size.map((at) => raw.sizes[at]);
  // Slices of each row in order of their starts. Rows hold no overlap, so their ends are in order too. The
  // last row of a crowded lane is the exception: it is drawn as ticks at the starts.
  const slices = Array.from({ length: lane.rows }, () => []);
  for (let i = 0; i < count; i += 1) slices[Math.min(row[i], lane.rows - 1)].push(i);
  const instants = { at_ns: sums(lane.instants.at_ns), name: lane.instants.name, value: lane.instants.value };
  return {
    ...lane, index, count, start_ns, bytes, row, slices, instants,
    duration_ns: read("duration_ns"), room_ns: read("room_ns"), queue_ns: read("queue_ns"),
    name: read("name"), layer: read("layer"), region: read("region"),
  };
};
const readDump = (raw) => {
  const lanes = raw.lanes.map((lane, index) => readLane(lane, index, raw));
  const levels = raw.levels.map((level) => ({ ...level, at_ns: sums(level.at_ns), bytes: sums(level.bytes) }));
  const tier = (kind) => levels.find((level) => level.kind === kind);
  return {
    ...raw, lanes, levels, tier,
    owners: levels.filter((level) => level.kind === "role" || level.kind === "tag"),
    phaseNames: raw.totals.phases.map((phase) => phase.name),
  };
};
const data = readDump(JSON.parse(byId("data").textContent));
const { lanes } = data;
const began = ({ lane, i }) => lane.start_ns[i];
const ended = ({ lane, i }) => lane.start_ns[i] + lane.duration_ns[i];
const titleOf = ({ lane, i }) => {
  const name = data.names[lane.name[i]], number = lane.layer[i] - 1;
  if (number < 0) return name;
  return lane.index === MICROBATCH ? `${name} ${number}` : `L${number} ${name}`;
};

// First index whose key is above `value`, or the length.
const above = (length, key, value) => {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(middle) > value) high = middle; else low = middle + 1;
  }
  return low;
};
// Levels before the oldest recorded change are not known.
const isRecorded = (dump, ns) => ns >= (dump.levels_from_ns ?? 0);
const levelAt = (level, ns) => {
  const at = above(level.at_ns.length, (i) => level.at_ns[i], ns) - 1;
  return level.bytes[Math.max(0, at)] ?? 0;
};

// ---- formats ---------------------------------------------------------------------------------

const scaled = (value, step, units) => {
  let at = 0;
  while (Math.abs(value) >= Math.min(step, 999.5) && at + 1 < units.length) { value /= step; at += 1; }
  const size = Math.abs(value);
  const decimals = at === 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return `${value.toFixed(decimals)} ${units[at]}`;
};
const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const duration = (ns) => ns === 0 ? "0 s" : scaled(ns, 1000, ["ns", "µs", "ms", "s"]);
const share = (part, whole) => whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–";
// A moment on the axis, with as many decimals as the distance between ticks asks for.
const moment = (ns, step_ns) => {
  const [unit, unit_ns] =
    step_ns >= 1e8 ? ["s", 1e9] : step_ns >= 1e5 ? ["ms", 1e6] : step_ns >= 100 ? ["µs", 1e3] : ["ns", 1];
  const decimals = Math.max(0, Math.ceil(-Math.log10(step_ns / unit_ns) - 1e-9));
  return `${(ns / unit_ns).toFixed(decimals)} ${unit}`;
};
const text = (tag, content, className = "") => {
  const element = document.createElement(tag);
  element.textContent = content;
  if (className) element.className = className;
  return element;
};
