"""Rows of how long a trainer waits for layers that sleep, over what cannot be undercut."""

from __future__ import annotations

import csv
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from awake import Awake, kept_awake
from ours import TARGET, Unavailable
from rows import LOWER, Row

DRIVER = TARGET / "release" / "examples" / "stall"
CASES = Path(__file__).with_name("stall_cases.csv")
OUT = TARGET / "bench" / "stall.json"

FAMILIES = (
    "small_host",
    "small_three_tiers",
    "small_direct",
    "large_host",
    "large_three_tiers",
    "large_direct",
)
OURS = "planned"
PEERS = ("one_layer_ahead", "on_demand")
# Runs that count, and maximum runs. A run is calm if other processes used at most CALM_SHARE of the
# processors; runs repeat until REPEATS were calm, and the calmest count.
REPEATS = 9
RUNS_MAX = 36
CALM_SHARE = 0.01
# The peers wait ten times as long, with less relative variation.
REPEATS_OF_PEERS = 3
# Bar of a stall: this multiple of the bound plus this fraction of the step.
BOUND_FACTOR = 1.05
STEP_FRACTION = 0.01

Ask = Callable[[str], dict]


@dataclass(frozen=True)
class Case:
    """One line of the table: a step, and the links and the memory it has."""

    family: str
    name: str
    words: str


def read_cases(path: Path = CASES) -> list[Case]:
    """The table; all but the first two columns are the driver's own words."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        Case(
            line.pop("family"), line.pop("case"), " ".join(f"{k}={v}" for k, v in line.items())
        )
        for line in lines
    ]


@dataclass(frozen=True)
class Measured:
    """A case's bound, and the runs of each policy."""

    case: Case
    about: dict
    runs: dict[str, list[dict]]

    @property
    def allowed_ns(self) -> float:
        """The step is the shortest one: what is computed, and the bound."""
        bound_ns = self.about["bound_ns"]
        step_ns = self.about["compute_ns"] + bound_ns
        return BOUND_FACTOR * bound_ns + STEP_FRACTION * step_ns

    @property
    def slept(self) -> bool:
        """Whether layers slept in every run of ours; true if the plan keeps all of them."""
        if not self.about["in_host"] + self.about["in_file"]:
            return True
        return all(run["slept_bytes"] > 0 for run in self.runs[OURS])

    def judged(self, policy: str) -> list[dict]:
        """The calmest runs."""
        return sorted(self.runs[policy], key=lambda run: run["share_of_others"])[:REPEATS]

    def over_bound(self, policy: str) -> float:
        return median(run["stall_ns"] for run in self.judged(policy)) / self.allowed_ns

    def over_bound_of_all(self, policy: str) -> float:
        return median(run["stall_ns"] for run in self.runs[policy]) / self.allowed_ns

    def of_step(self, policy: str) -> float:
        return median(run["stall_ns"] / run["total_ns"] for run in self.judged(policy))

    def record(self) -> dict:
        figures = {
            policy: {
                "over_bound": self.over_bound(policy),
                "over_bound_of_all_runs": self.over_bound_of_all(policy),
                "stall_of_step": self.of_step(policy),
                "runs": runs,
            }
            for policy, runs in self.runs.items()
        }
        return {"family": self.case.family, "case": self.case.name, **self.about, **figures}


def measure(case: Case, ask: Ask) -> Measured:
    """All policies in turn; each round another one begins."""
    about = ask(f"case {case.words}")
    runs: dict[str, list[dict]] = {policy: [] for policy in (OURS, *PEERS)}
    for policy in turns():
        runs[policy].append(ask(f"run {policy}"))
    while count_calm(runs[OURS]) < REPEATS and len(runs[OURS]) < RUNS_MAX:
        runs[OURS].append(ask(f"run {OURS}"))
    return Measured(case, about, runs)


def count_calm(runs: list[dict]) -> int:
    return sum(run["share_of_others"] <= CALM_SHARE for run in runs)


def turns() -> Iterator[str]:
    policies = (OURS, *PEERS)
    for turn in range(REPEATS):
        first = turn % len(policies)
        for policy in policies[first:] + policies[:first]:
            if policy == OURS or turn < REPEATS_OF_PEERS:
                yield policy


def row_name(family: str) -> str:
    return f"stall_over_bound_{family}"


def stall(family: str) -> Row:
    """Measures every case of the family."""
    cases = [case for case in read_cases() if case.family == family]
    how = (
        "worst case of median stall / (1.05 x bound + 1 % of the step), simulated links on the host "
        f"device, processors kept from halting, {len(cases)} cases of {CASES.name}, {REPEATS} runs "
        f"each, the calmest of at most {RUNS_MAX}, the peers' {REPEATS_OF_PEERS} between them; "
        "peers: the same work all asleep, with one layer's look-ahead and on demand"
    )
    row = Row(row_name(family), "ratio", LOWER, how, bar=1)
    measured: list[Measured] = []
    try:
        with kept_awake() as awake, Driver() as driver:
            for case in cases:
                measured.append(measure(case, watched(driver, awake)))
    except Unavailable as reason:
        row.note("ours", reason)
        return row
    finally:
        keep(measured)
    fill(row, measured)
    return row


def fill(row: Row, measured: list[Measured]) -> None:
    """The worst case of each policy, and how much of the step it waits in the median case."""
    awake = [one.case.name for one in measured if not one.slept]
    if awake:
        row.note("ours", f"no layer slept in {', '.join(awake)}")
    else:
        row.put("ours", max(one.over_bound(OURS) for one in measured))
    for policy in PEERS:
        row.put(policy, max(one.over_bound(policy) for one in measured))
    worst = max(measured, key=lambda one: one.over_bound(OURS))
    exact = sum(one.about["is_exact"] for one in measured)
    shares = ", ".join(
        f"{policy} {median(one.of_step(policy) for one in measured):.1%}"
        for policy in (OURS, *PEERS)
    )
    row.how += (
        f"; worst: {worst.case.name}; the bound is the optimum in {exact} of {len(measured)}, else "
        f"the best plan known; stall of the step, median case: {shares}; each case in {OUT.name}"
    )


def keep(measured: list[Measured], path: Path = OUT) -> None:
    """Writes the cases; those of an earlier run that were not measured now stay."""
    kept: dict[tuple[str, str], dict] = {}
    if path.exists():
        kept = {(one["family"], one["case"]): one for one in json.loads(path.read_text())}
    kept |= {(one.case.family, one.case.name): one.record() for one in measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(kept.values()), indent=1) + "\n")


def watched(driver: Driver, awake: Awake) -> Ask:
    """As the driver's own, with the share of the processors that others had meanwhile."""

    def ask(line: str) -> dict:
        process = driver.process.pid
        begun_s, before_s = time.monotonic(), awake.of_others_s(process)
        answer = driver.ask(line)
        all_s = len(awake.spinners) * (time.monotonic() - begun_s)
        return answer | {"share_of_others": (awake.of_others_s(process) - before_s) / all_s}

    return ask


class Driver:
    """The trainer: a process that answers lines."""

    def __init__(self) -> None:
        if not DRIVER.exists():
            raise Unavailable(f"{DRIVER} is missing (make bench-offload builds it)")
        self.process = subprocess.Popen(
            [DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Driver:
        return self

    def ask(self, line: str) -> dict:
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self.process.stdout.readline()
        if not answer:
            raise Unavailable(f"{DRIVER.name} ended with {self.process.wait()} at: {line}")
        return json.loads(answer)

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
