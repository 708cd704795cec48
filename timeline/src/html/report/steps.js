// The steps of a dump, and a time axis on which the gaps between them are folded.

const STEPS_SHOWN_MAX = 200, FOLD_SHARE = 0.03;

// A step is a run of phases: it begins with a phase of the name that sorts first (A), behind one of another
// name.
const findSteps = (dump) => {
  const { start_ns, duration_ns, name, count } = dump.lanes[PHASE];
  const first = dump.phaseNames.reduce((a, b) => (b < a ? b : a), dump.phaseNames[0] ?? "");
  const steps = [];
  let before = "";
  for (let i = 0; i < count; i += 1) {
    const phase = dump.names[name[i]], end = start_ns[i] + duration_ns[i];
    const last = steps[steps.length - 1];
    if (!last || (phase === first && before !== first && start_ns[i] >= last.to)) steps.push({ from: start_ns[i], to: end });
    else last.to = Math.max(last.to, end);
    before = phase;
  }
  const awake = dump.tier("awake"), stalls = dump.lanes[STALL];
  for (const step of steps) {
    // Null: not recorded.
    const recorded = isRecorded(dump, step.from);
    step.peak = recorded ? levelAt(awake, step.from) : null;
    const changes = recorded ? above(awake.at_ns.length, (i) => awake.at_ns[i], step.from) : Infinity;
    for (let at = changes; awake.at_ns[at] <= step.to; at += 1) {
      step.peak = Math.max(step.peak, awake.bytes[at]);
    }
    // Waits of several threads at once count once.
    let covered = step.from;
    step.stall = 0;
    for (let i = above(stalls.count, (at) => stalls.start_ns[at], step.from - 1); stalls.start_ns[i] <= step.to; i += 1) {
      const from = Math.max(covered, stalls.start_ns[i]);
      const to = Math.min(step.to, stalls.start_ns[i] + stalls.duration_ns[i]);
      if (to > from) { step.stall += to - from; covered = to; }
    }
  }
  return steps;
};
const steps = findSteps(data);

// Stretches without any step that are longer than a small part of all steps shrink to that.
const folds = [];
{
  const busy = steps.reduce((sum, step) => sum + step.to - step.from, 0);
  const least = (busy / Math.max(1, Math.min(steps.length, 8))) * FOLD_SHARE;
  let removed = 0;
  const add = (from, to) => {
    if (steps.length === 0 || to - from <= 2 * least) return;
    removed += to - from - least;
    folds.push({ from, to, shown: least, end: to - removed, removed });
  };
  let from = 0;
  for (const step of steps) { add(from, step.from); from = Math.max(from, step.to); }
  add(from, data.window_ns);
}
// From time to a place on the folded axis, and back.
const fold = (ns) => {
  if (folds.length === 0) return ns;
  const at = above(folds.length, (i) => folds[i].from, ns) - 1;
  if (at < 0) return ns;
  const { from, to, shown, removed } = folds[at];
  if (ns >= to) return ns - removed;
  return from - (removed - (to - from - shown)) + ((ns - from) / (to - from)) * shown;
};
const unfold = (place) => {
  if (folds.length === 0) return place;
  const at = above(folds.length, (i) => folds[i].end - folds[i].shown, place) - 1;
  if (at < 0) return place;
  const { from, to, shown, end, removed } = folds[at];
  if (place >= end) return place + removed;
  return from + ((place - (end - shown)) / shown) * (to - from);
};
