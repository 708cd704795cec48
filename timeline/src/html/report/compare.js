// Another dump beside this one, chosen from a file.

const COMPARED_PX = 150;

// The data of another page, as a browser would find it. Its tags are put together here: written out they would
// end this script.
const dataOf = (page) => {
  const tag = "script", begin = `<${tag} type="application/json" id="data">`;
  const from = page.indexOf(begin);
  if (from < 0) throw new Error("the file is not a page of dormouse");
  const raw = JSON.parse(page.slice(from + begin.length, page.indexOf(`</${tag}`, from)));
  if (raw.version !== data.version) throw new Error(`the page has data of version ${raw.version}; accepted: ${data.version}`);
  return readDump(raw);
};
const waits = (dump) => dump.totals.lanes[STALL].busy_ns;
const figuresOf = (dump) => {
  const figures = [["peak awake", dump.peak?.bytes ?? 0, bytes]];
  for (const { title, bytes: held } of dump.peak?.owners ?? []) figures.push([`at the peak: ${title}`, held, bytes]);
  figures.push(["at the peak: cached or staged", dump.peak?.beside_bytes ?? 0, bytes]);
  figures.push(["compute waited", waits(dump), duration]);
  for (const cause of new Set(dump.stalls.map((stall) => stall.cause))) {
    const of = dump.stalls.filter((stall) => stall.cause === cause);
    figures.push([`waits: ${cause}`, of.reduce((sum, stall) => sum + stall.to_ns - stall.from_ns, 0), duration]);
  }
  const steps = findSteps(dump);
  if (steps.length > 0) figures.push(["time of a step", steps.reduce((sum, step) => sum + step.to - step.from, 0) / steps.length, duration]);
  for (const phase of dump.totals.phases) figures.push([`${phase.name}, each`, phase.busy_ns / phase.count, duration]);
  dump.lanes.forEach((lane, at) => {
    const { bytes: moved, busy_ns } = dump.totals.lanes[at];
    if (lane.copy && moved > 0) figures.push([`${lane.title}, bytes`, moved, bytes], [`${lane.title}, rate`, (moved / Math.max(1, busy_ns)) * 1e9, (rate) => `${bytes(rate)}/s`]);
  });
  return figures;
};
const changeOf = (here, there) => here === there ? "=" : here > 0 ? `${there > here ? "+" : "−"}${Math.abs((100 * (there - here)) / here).toFixed(1)} %` : "new";
const compareTable = (other) => {
  const [ours, theirs] = [figuresOf(data), figuresOf(other)];
  const keys = [...new Set([...ours, ...theirs].map(([key]) => key))];
  const rows = keys.map((key) => {
    const [here, there] = [ours, theirs].map((of) => of.find(([its]) => its === key));
    const show = (here ?? there)[2], row = document.createElement("tr");
    const values = [here?.[1] ?? 0, there?.[1] ?? 0];
    row.append(text("td", key), text("td", show(values[0])), text("td", show(values[1])), text("td", changeOf(...values)));
    return row;
  });
  byId("compared").replaceChildren(...rows);
};
// The last step of each dump, at one scale of bytes and one of time.
const compareStacks = (other) => {
  const dumps = [data, other].map((dump) => {
    const last = findSteps(dump).pop() ?? { from: 0, to: dump.window_ns };
    return { dump, last, layers: layersOf(dump) };
  });
  const most = Math.max(1, ...dumps.map(({ dump }) => peakOf(dump.tier("awake"))));
  const longest = Math.max(1, ...dumps.map(({ last }) => last.to - last.from));
  dumps.forEach(({ dump, last, layers }, at) => {
    const target = byId(`stack-${at}`), ratio = window.devicePixelRatio || 1, wide = target.clientWidth;
    [target.width, target.height] = [wide * ratio, COMPARED_PX * ratio];
    const brush = target.getContext("2d"), scale = (COMPARED_PX - 4) / most;
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    brush.font = FONT;
    const count = Math.max(1, Math.floor((wide * (last.to - last.from)) / longest));
    const columns = columnsOf(dump, layers, count, (column) => last.from + (column / count) * (last.to - last.from));
    paintStack(brush, layers, columns, 0, COMPARED_PX, scale);
    labelStack(brush, layers, columns, 0, COMPARED_PX, scale);
  });
};
const titleOfDump = (dump) => `${dump.process} · rank ${dump.rank} · pid ${dump.pid}`;
let compared = null;
const compare = (other) => {
  compared = other;
  byId("compare").hidden = false;
  byId("name-0").textContent = byId("column-0").textContent = `this: ${titleOfDump(data)}`;
  byId("name-1").textContent = byId("column-1").textContent = `other: ${titleOfDump(other)}`;
  compareTable(other);
  compareStacks(other);
};
byId("other-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  byId("trouble").textContent = "";
  try {
    compare(dataOf(await file.text()));
    byId("compare").scrollIntoView({ block: "start" });
  } catch (error) {
    byId("trouble").textContent = `${file.name}: ${error.message}`;
  }
});
new ResizeObserver(() => compared && compareStacks(compared)).observe(byId("compare"));
