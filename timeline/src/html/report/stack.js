// The device's bytes by owner: found for each pixel column, and painted as a stack with patterns.

const OWNER_COLOURS = { "K and V": "boundary", accumulators: "accumulators", "saved activations": "dormant" };
const TAGS_COLOURED = 3;

// Owners from the bottom up; what no owner holds lies on top.
const layersOf = (dump) => {
  let tags = 0;
  const layers = dump.owners.filter((owner) => owner.bytes.some((level) => level > 0)).map((level) => {
    const look = level.kind === "tag" ? `tag-${tags++ % TAGS_COLOURED}` : OWNER_COLOURS[level.title];
    return { title: level.title, level, look };
  });
  return [...layers, { title: "other", level: null, look: "other" }];
};

// For each of `count` columns, the levels at the moment of its highest total. `timeOf(column)` is the time at
// a column's left edge.
const columnsOf = (dump, layers, count, timeOf) => {
  const awake = dump.tier("awake"), { at_ns, bytes: total } = awake;
  const parts = layers.map(() => new Float64Array(count)), totals = new Float64Array(count);
  const cursors = layers.map(() => 0);
  let next = above(at_ns.length, (i) => at_ns[i], timeOf(0));
  for (let column = 0; column < count; column += 1) {
    const to = timeOf(column + 1);
    let best = Math.max(0, next - 1), moment_ns = Math.max(timeOf(column), at_ns[best] ?? 0);
    for (; next < at_ns.length && at_ns[next] <= to; next += 1) {
      if (total[next] >= total[best]) { best = next; moment_ns = at_ns[next]; }
    }
    totals[column] = to > (at_ns[0] ?? 0) ? total[best] : 0;
    let left = totals[column];
    layers.forEach(({ level }, layer) => {
      let value = left;
      if (level) {
        let at = cursors[layer];
        if (column === 0) at = Math.max(0, above(level.at_ns.length, (i) => level.at_ns[i], moment_ns) - 1);
        while (at + 1 < level.at_ns.length && level.at_ns[at + 1] <= moment_ns) at += 1;
        cursors[layer] = at;
        // An owner's level and the total change one after the other.
        value = Math.min(left, level.bytes[at] ?? 0);
      }
      parts[layer][column] = value;
      left -= value;
    });
  }
  return { parts, totals };
};

// Hatching tells owners apart without colour.
const HATCHES = {
  accumulators: (pen) => { for (const [x, y] of [[2, 2], [6, 6]]) { pen.beginPath(); pen.arc(x, y, 1.1, 0, 7); pen.fill(); } },
  dormant: (pen) => { for (const x of [-8, 0, 8]) { pen.beginPath(); pen.moveTo(x, 8); pen.lineTo(x + 8, 0); pen.stroke(); } },
  "tag-0": (pen) => { pen.fillRect(3, 0, 1.2, 8); },
  "tag-1": (pen) => { pen.fillRect(0, 3, 8, 1.2); },
  "tag-2": (pen) => { pen.fillRect(3, 0, 1.2, 8); pen.fillRect(0, 3, 8, 1.2); },
  stall: (pen) => { for (const x of [-8, 0, 8]) { pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x + 8, 8); pen.stroke(); } },
};
let patterns = {};
const patternOf = (look) => {
  if (!patterns[look]) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = colours[look];
    pen.fillRect(0, 0, 8, 8);
    pen.fillStyle = pen.strokeStyle = colours.hatch;
    pen.lineWidth = 1.2;
    HATCHES[look]?.(pen);
    patterns[look] = { fill: pen.createPattern(tile, "repeat") };
  }
  return patterns[look];
};

// Paints columns one pixel wide from `left`, their base at `base`.
const paintStack = (pen, layers, { parts, totals }, left, base, pixelsPerByte) => {
  const floor = new Float64Array(totals.length);
  layers.forEach(({ look }, layer) => {
    const values = parts[layer];
    const top = (column) => base - (floor[column] + values[column]) * pixelsPerByte;
    pen.beginPath();
    pen.moveTo(left, base - floor[0] * pixelsPerByte);
    for (let column = 0; column < values.length; column += 1) {
      pen.lineTo(left + column, top(column));
      pen.lineTo(left + column + 1, top(column));
    }
    for (let column = values.length - 1; column >= 0; column -= 1) {
      pen.lineTo(left + column + 1, base - floor[column] * pixelsPerByte);
      pen.lineTo(left + column, base - floor[column] * pixelsPerByte);
    }
    pen.fillStyle = patternOf(look).fill;
    pen.fill();
    for (let column = 0; column < values.length; column += 1) floor[column] += values[column];
  });
};
// Writes each owner's title where its band is wide and high enough to hold it.
const labelStack = (pen, layers, { parts, totals }, left, base, pixelsPerByte) => {
  const floor = new Float64Array(totals.length);
  layers.forEach(({ title }, layer) => {
    const values = parts[layer], room = Math.ceil(pen.measureText(title).width) + 10;
    let best = null;
    for (let from = 0; from + room <= values.length; from += 12) {
      let low = 0, high = Infinity;
      for (let column = from; column < from + room && high > low; column += 4) {
        low = Math.max(low, floor[column]);
        high = Math.min(high, floor[column] + values[column]);
      }
      const height_px = (high - low) * pixelsPerByte;
      if (height_px >= 15 && (!best || height_px > best.height_px + 2)) best = { from, low, height_px };
    }
    for (let column = 0; column < values.length; column += 1) floor[column] += values[column];
    if (!best) return;
    const [x, y] = [left + best.from + 1, base - best.low * pixelsPerByte - best.height_px / 2];
    pen.fillStyle = colours.card;
    pen.globalAlpha = 0.78;
    pen.fillRect(x, y - 7.5, room - 2, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.ink;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(title, x + 4, y);
  });
};
