//! Published step times, simulated: `tests/testdata/published/*.txt`, each a model, a machine and its figures.
//!
//! Rates come from the split named in `rates_from`; the speedups of all other splits are held out, and must
//! be within [`WITHIN`]. `UPDATE=1 cargo test -p dormouse-parallel` rewrites the table; read the diff.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use dormouse_parallel::simulate::{SimulatedRank, Tier, World};
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::{Loss, Machine, ModelShape, OpKind, Plan, PlanOptions, Scoring};

/// Largest relative error of a speedup that no rate was taken from.
const WITHIN: f64 = 0.1;
/// Largest relative error of a figure that the rates solve: they are given to four digits.
const SOLVED_WITHIN: f64 = 1e-3;
/// Responses of the published phase seconds.
const PHASE_RESPONSES: u32 = 32;

/// Prefix and suffix tokens.
type Split = (u64, u64);

/// How dense runs, prefixes and microbatches run: names of machines.
#[derive(Debug, Default)]
struct Way {
    dense: String,
    prefix: String,
    microbatch: String,
}

#[derive(Debug, Default)]
struct Case {
    model: ModelShape,
    gpus: u64,
    machines: BTreeMap<String, Machine>,
    ways: BTreeMap<String, Way>,
    rates_from: Split,
    responses: Vec<u32>,
    /// Seconds of A, B and C, by way and split.
    phases: BTreeMap<(String, Split), [f64; 3]>,
    speedups: BTreeMap<(String, Split), Vec<f64>>,
}

/// Seconds of a shared step.
#[derive(Clone, Copy)]
struct Shared {
    prefix_s: f64,
    microbatch_s: f64,
    total_s: f64,
}

fn parse(text: &str) -> Case {
    let mut case = Case {
        model: ModelShape { dtype_bytes: 2, saved_bytes_per_token_layer: 1, ..Default::default() },
        ..Case::default()
    };
    for (key, words) in crate::lines(text) {
        let number = |at: usize| crate::number::<u64>(&words, at);
        let numbers = |from: usize| (from..words.len()).map(|at| crate::number::<f64>(&words, at));
        let row = || (words[0].to_owned(), (number(1), number(2)));
        match key {
            "gpus" => case.gpus = number(0),
            "layers" => case.model.layers = number(0) as u32,
            "heads" => case.model.heads = number(0) as u32,
            "kv_heads" => case.model.kv_heads = number(0) as u32,
            "head_dim" => case.model.head_dim = number(0) as u32,
            "layer_linear_weights" => case.model.layer_linear_weights = number(0),
            "head_weights" => case.model.head_weights = number(0),
            "machine" => {
                let [flops, prefix, causal, op_ms] = numbers(1).collect::<Vec<_>>()[..] else {
                    panic!("{words:?}")
                };
                let of_all = |tera: f64| (tera * 1e12).round() as u64 * case.gpus;
                let machine = Machine {
                    flops_per_s: of_all(flops),
                    prefix_attention_flops_per_s: of_all(prefix),
                    causal_attention_flops_per_s: of_all(causal),
                    op_overhead_ns: (op_ms * 1e6).round() as u64,
                    ..Machine::default()
                };
                case.machines.insert(words[0].to_owned(), machine);
            }
            "way" => {
                let [name, dense, prefix, microbatch] = [0, 1, 2, 3].map(|at| words[at].to_owned());
                case.ways.insert(name, Way { dense, prefix, microbatch });
            }
            "rates_from" => case.rates_from = (number(0), number(1)),
            "responses" => case.responses = numbers(0).map(|n| n as u32).collect(),
            "phases" => {
                case.phases.insert(row(), [3, 4, 5].map(|at| crate::number(&words, at)));
            }
            "speedups" => {
                case.speedups.insert(row(), numbers(3).collect());
            }
            _ => panic!("unknown line {key:?}"),
        }
    }
    case
}

impl Case {
    /// Plans a forest with one sequence a microbatch, and simulates it on a machine.
    fn simulate(&self, parents: &[u32], lengths: &[u64], machine: &str) -> (Plan, SimulatedRank) {
        let forest = Forest::from_nodes(parents, lengths).unwrap();
        let scoring = Scoring { loss: Loss::AllButFirst, weight: 1.0 };
        let options = PlanOptions {
            vocab: 1,
            microbatch_rows: *lengths.last().unwrap() as u32,
            always_share: true,
            model: self.model,
            machine: Some(self.machines[machine]),
            ..PlanOptions::default()
        };
        let plan = Plan::new(&forest, &vec![scoring; forest.endings().len()], &options).unwrap();
        let rank = SimulatedRank::of_plan(&plan, Tier::Host).unwrap();
        (plan, rank)
    }

    fn dense_s(&self, way: &Way, (prefix, suffix): Split, responses: u32) -> f64 {
        let lengths = vec![prefix + suffix; responses as usize];
        let parents = vec![NO_PARENT; responses as usize];
        let (_, rank) = self.simulate(&parents, &lengths, &way.dense);
        assert_eq!(rank.steps.len(), responses as usize, "one trajectory a step");
        total_s(rank)
    }

    fn shared(&self, way: &Way, (prefix, suffix): Split, responses: u32) -> Shared {
        let mut lengths = vec![suffix; responses as usize + 1];
        lengths[0] = prefix;
        let mut parents = vec![0; lengths.len()];
        parents[0] = NO_PARENT;
        let (plan, mut rank) = self.simulate(&parents, &lengths, &way.prefix);
        let (_, other) = self.simulate(&parents, &lengths, &way.microbatch);
        let (mut prefix_ns, mut microbatch_ns) = (0, 0);
        for (op, (step, other)) in plan.ops().iter().zip(rank.steps.iter_mut().zip(other.steps)) {
            if matches!(op.kind, OpKind::Microbatch { .. }) {
                *step = other;
                microbatch_ns = step.compute_ns;
            } else {
                prefix_ns += step.compute_ns;
            }
        }
        assert_eq!(rank.steps.len(), responses as usize + 2, "A, a suffix a step, C");
        let seconds = |ns: u64| ns as f64 * 1e-9;
        Shared {
            prefix_s: seconds(prefix_ns),
            microbatch_s: seconds(microbatch_ns),
            total_s: total_s(rank),
        }
    }

    /// Adds the seconds of dense runs, suffixes, and prefixes, beside those published.
    fn print_seconds(&self, text: &mut String) {
        writeln!(text, "seconds: published, simulated, ratio; * solved by the rates").unwrap();
        for ((name, split), [a_s, b_s, c_s]) in &self.phases {
            let way = &self.ways[name];
            let at = self.responses.iter().position(|n| *n == PHASE_RESPONSES).unwrap();
            let per_response = f64::from(PHASE_RESPONSES).recip();
            let speedup = self.speedups[&(name.clone(), *split)][at];
            let shared = self.shared(way, *split, PHASE_RESPONSES);
            // The seconds of A and C are those of the machine that runs them.
            let rates_of_prefix = self.rates_from == *split && way.prefix == way.dense;
            let solved = self.rates_from == *split;
            for (what, published_s, simulated_s, solved) in [
                (
                    "dense",
                    speedup * (a_s + b_s + c_s) * per_response,
                    self.dense_s(way, *split, 1),
                    solved,
                ),
                ("suffix", b_s * per_response, shared.microbatch_s, solved),
                ("A and C", a_s + c_s, shared.prefix_s, rates_of_prefix),
            ] {
                let ratio = simulated_s / published_s;
                let (prefix, suffix) = split;
                let mark = if solved { " *" } else { "" };
                writeln!(
                    text,
                    "{name:<8} {prefix:>5} + {suffix:>5} {what:<7} {published_s:6.3} \
                     {simulated_s:6.3} {ratio:.3}{mark}"
                )
                .unwrap();
                let off = (ratio - 1.0).abs();
                assert!(!solved || off < SOLVED_WITHIN, "{name} {split:?} {what}: {ratio}");
            }
        }
    }

    /// Adds all speedups beside those published.
    fn print_speedups(&self, text: &mut String) {
        writeln!(text, "speedups: published, simulated, ratio; * rates from this split").unwrap();
        let mut worst: BTreeMap<&str, f64> = BTreeMap::new();
        for ((name, split), published) in &self.speedups {
            let way = &self.ways[name];
            let held_out = *split != self.rates_from;
            for (responses, published) in self.responses.iter().zip(published) {
                let dense_s = self.dense_s(way, *split, *responses);
                let speedup = dense_s / self.shared(way, *split, *responses).total_s;
                let ratio = speedup / published;
                let (prefix, suffix) = split;
                let mark = if held_out { "" } else { " *" };
                writeln!(
                    text,
                    "{name:<8} {prefix:>5} + {suffix:>5} N {responses:>3} {published:.3} \
                     {speedup:.3} {ratio:.3}{mark}"
                )
                .unwrap();
                if held_out {
                    // `max` drops a NaN.
                    assert!(ratio.is_finite(), "{name} {split:?} N {responses}: {ratio}");
                    let worst = worst.entry(name).or_default();
                    *worst = worst.max((ratio - 1.0).abs());
                }
            }
        }
        for (name, worst) in worst {
            writeln!(text, "{name}: held-out speedups within {:.1} %", 100.0 * worst).unwrap();
            assert!(worst <= WITHIN, "{name}: {worst}");
        }
    }
}

fn total_s(rank: SimulatedRank) -> f64 {
    World { ranks: vec![rank], ..World::default() }.run().unwrap().total_ns as f64 * 1e-9
}

#[test]
fn published_speedups() {
    crate::scenarios("published", 1, |input| {
        let case = parse(input);
        let mut text = String::new();
        case.print_seconds(&mut text);
        case.print_speedups(&mut text);
        text
    });
}
