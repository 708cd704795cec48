//! How long a trainer waits for layers that sleep: a driver of `make bench-offload`.
//!
//! It answers each line of its input with a line of JSON. `case` and the words of
//! [`case::Case`] makes that the case from then on, and tells its bound; `run` and a
//! [`policy::Policy`] plays one step of it, on links whose rates are simulated by sleeping. Each
//! policy has a fixture of its own, in which a step has been played before.
#![allow(unsafe_code, reason = "plays a trainer and a disk, which have memory by address")]

mod bound;
mod case;
mod device;
mod disk;
mod fixture;
mod pace;
mod policy;
mod trainer;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;
use std::io::{self, BufRead, Write};

use dormouse_offload::Tier;

use crate::bound::Bound;
use crate::case::Case;
use crate::fixture::Fixture;
use crate::policy::Policy;
use crate::trainer::Outcome;

fn main() -> Result<(), Box<dyn Error>> {
    wake_on_time()?;
    let mut out = io::stdout();
    let mut current: Option<(Case, Bound)> = None;
    let mut houses: HashMap<Policy, Fixture> = HashMap::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let answer = match (verb, &current) {
            ("case", _) => {
                let case: Case = rest.parse()?;
                let found = bound::bound(&case).ok_or("no plan comes to an end")?;
                let told = about(&case, &found);
                houses.clear();
                current = Some((case, found));
                told
            }
            ("run", Some((case, bound))) => {
                let (plan, policy) = (&bound.plan, rest.parse()?);
                let fixture = match houses.entry(policy) {
                    Entry::Occupied(there) => there.into_mut(),
                    Entry::Vacant(none) => none.insert(trainer::fixture(case, plan, policy)?),
                };
                shown(&trainer::run(fixture, case, plan, policy)?)
            }
            _ => return Err(format!("{line}: a line is `case WORDS`, then `run POLICY`").into()),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

/// Has the system wake this thread, and those it starts, when they asked to be: links are not late.
fn wake_on_time() -> io::Result<()> {
    const SLACK_NS: libc::c_ulong = 1;
    // SAFETY: plain numbers.
    match unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, SLACK_NS) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A case's bound and plan.
fn about(case: &Case, bound: &Bound) -> String {
    let compute_ns = case.work().compute_ns();
    let count = |choice| bound.plan.groups.iter().filter(|group| group.choice == choice).count();
    format!(
        r#"{{"compute_ns": {compute_ns}, "bound_ns": {}, "is_exact": {}, "proven_ns": {}, "planned_ns": {}, "kept": {}, "in_host": {}, "in_file": {}}}"#,
        bound.stall_ns,
        bound.is_exact,
        bound.proven_ns,
        bound.planned.stall_ns,
        count(Tier::Device),
        count(Tier::Host),
        count(Tier::Nvme),
    )
}

fn shown(outcome: &Outcome) -> String {
    let Outcome { total_ns, compute_ns, stall_ns, slept_bytes, written_bytes } = outcome;
    let all_ns: u64 = stall_ns.iter().sum();
    format!(
        r#"{{"total_ns": {total_ns}, "compute_ns": {compute_ns}, "stall_ns": {all_ns}, "stall_by_phase_ns": {stall_ns:?}, "slept_bytes": {slept_bytes}, "written_bytes": {written_bytes}}}"#
    )
}
