//! Readable scenarios: `tests/testdata/simulate/*.txt`, each one rank's steps and what happens.
//!
//! Every link carries a byte in a nanosecond. `UPDATE=1 cargo test -p dormouse-parallel` rewrites the
//! expectations; read the diff.

use std::fmt::Write as _;

use dormouse_parallel::simulate::*;
use dormouse_schedule::Machine;

const RATE: u64 = 1_000_000_000;

fn parse(text: &str) -> (SimulatedRank, Vec<String>) {
    let mut rank = SimulatedRank {
        machine: Machine {
            sleep_bytes_per_s: RATE,
            wake_bytes_per_s: RATE,
            nvme_write_bytes_per_s: RATE,
            nvme_read_bytes_per_s: RATE,
            ..Machine::default()
        },
        ..SimulatedRank::default()
    };
    let mut names = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "device_bytes" => rank.machine.device_bytes = words[1].parse().unwrap(),
            "host_bytes" => rank.machine.host_bytes = words[1].parse().unwrap(),
            "block" => {
                names.push(words[1].to_owned());
                rank.block_bytes.push(words[2].parse().unwrap());
            }
            "step" => rank.steps.push(step(&names, &words[1..])),
            other => panic!("unknown line {other:?}"),
        }
    }
    (rank, names)
}

fn step(names: &[String], words: &[&str]) -> SimulatedStep {
    let mut step =
        SimulatedStep { compute_ns: words[0].parse().unwrap(), ..SimulatedStep::default() };
    let mut verb = "";
    for word in &words[1..] {
        if ["makes", "needs", "frees", "sleeps", "wakes"].contains(word) {
            verb = word;
            continue;
        }
        let (name, tier) = match word.strip_suffix(":nvme") {
            Some(name) => (name, Tier::Nvme),
            None => (*word, Tier::Host),
        };
        let block = names.iter().position(|known| known == name).unwrap() as u32;
        match verb {
            "makes" => step.allocates.push(block),
            "needs" => step.needs.push(block),
            "frees" => step.frees.push(block),
            "sleeps" => step.sleeps.push(BlockSleep { block, tier }),
            "wakes" => step.wakes.push(block),
            _ => panic!("{word:?} before a verb"),
        }
    }
    step
}

fn print(rank: SimulatedRank, names: &[String]) -> String {
    let timeline = match (World { ranks: vec![rank], ..World::default() }).run() {
        Ok(mut timeline) => timeline.ranks.remove(0),
        Err(error) => return format!("{error}\n"),
    };
    let mut text = String::new();
    for (number, step) in timeline.steps.iter().enumerate() {
        let waited = step.start_ns - step.reached_ns;
        let waited = if waited > 0 { format!(" after {waited} of waiting") } else { String::new() };
        writeln!(text, "step {number}: {} to {}{waited}", step.start_ns, step.end_ns).unwrap();
    }
    for copy in &timeline.copies {
        let name = &names[copy.block as usize];
        writeln!(text, "{:?} {name}: {} to {}", copy.link, copy.start_ns, copy.end_ns).unwrap();
    }
    write!(text, "bytes (device, host, NVMe):").unwrap();
    for s in &timeline.bytes {
        write!(text, " {}:({}, {}, {})", s.ns, s.device_bytes, s.host_bytes, s.nvme_bytes).unwrap();
    }
    let p = timeline.peak;
    writeln!(
        text,
        "\nat most ({}, {}, {}); waits {} for room, {} for wakes; {} woken on demand",
        p.device_bytes,
        p.host_bytes,
        p.nvme_bytes,
        timeline.waits.room_ns,
        timeline.waits.wakes_ns,
        timeline.demand_wakes
    )
    .unwrap();
    text
}

#[test]
fn scenarios() {
    crate::scenarios("simulate", 8, |input| {
        let (rank, names) = parse(input);
        print(rank, &names)
    });
}
