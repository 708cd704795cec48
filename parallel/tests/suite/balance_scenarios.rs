//! Readable scenarios: `tests/testdata/balance/*.txt`, each a forest and the shares expected of it.
//!
//! `UPDATE=1 cargo test -p dormouse-parallel` rewrites the expectations; read the diff.

use std::fmt::Write as _;

use crate::balance_common::{options, with_endings};
use dormouse_parallel::balance::*;
use dormouse_schedule::forest::{Forest, NO_PARENT};

struct Scenario {
    parents: Vec<u32>,
    lengths: Vec<u64>,
    inside: Vec<(u32, u64)>,
    groups: Vec<u32>,
    options: BalanceOptions,
}

impl Scenario {
    fn parse(text: &str) -> Self {
        let mut scenario = Self {
            parents: Vec::new(),
            lengths: Vec::new(),
            inside: Vec::new(),
            groups: Vec::new(),
            options: options(1),
        };
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (key, value) = line.split_once(' ').unwrap();
            scenario.line(key, value);
        }
        scenario
    }

    fn line(&mut self, key: &str, value: &str) {
        let pair = |value: &str| {
            let (a, b) = value.split_once(' ').unwrap();
            (a.parse().unwrap_or(NO_PARENT), b.parse::<u64>().unwrap())
        };
        let options = &mut self.options;
        match key {
            // Parent (`root` for none) and tokens; `inside` names a node and the tokens at the end.
            "node" => {
                let (parent, tokens) = pair(value);
                self.parents.push(parent);
                self.lengths.push(tokens);
            }
            "inside" => self.inside.push(pair(value)),
            "groups" => {
                self.groups = value.split(' ').map(|group| group.parse().unwrap()).collect();
            }
            "ranks" => options.ranks = value.parse().unwrap(),
            "method" => options.method = serde_json::from_value(value.into()).unwrap(),
            "unit" => options.unit = serde_json::from_value(value.into()).unwrap(),
            "exchange" => options.exchange = value == "yes",
            "ops_hold_collectives" => options.ops_hold_collectives = value == "yes",
            "microbatch_tokens" => options.microbatch_tokens = value.parse().unwrap(),
            "link_bytes_per_s" => options.machine.link_bytes_per_s = value.parse().unwrap(),
            "op_overhead_ns" => options.machine.op_overhead_ns = value.parse().unwrap(),
            "row_s" => options.rates.rows = value.parse().unwrap(),
            other => panic!("unknown line {other:?}"),
        }
    }

    fn forest(&self) -> Forest {
        let leaves = Forest::from_nodes(&self.parents, &self.lengths).unwrap();
        let ends = leaves.endings().iter().map(|ending| (ending.node.0, ending.tokens));
        let ends: Vec<(u32, u64)> = ends.chain(self.inside.iter().copied()).collect();
        with_endings(&self.parents, &self.lengths, &ends)
    }

    fn print(&self) -> String {
        let forest = self.forest();
        let batch = Workload { forest: &forest, groups: &self.groups, logit_rows: &[] };
        match Shares::new(&batch, &self.options) {
            Ok(shares) => print(&shares),
            Err(error) => format!("refused: {error}\n"),
        }
    }
}

fn print(shares: &Shares) -> String {
    let mut text = String::new();
    for (rank, share) in shares.shares.iter().enumerate() {
        write!(text, "rank {rank} leaves").unwrap();
        for run in &share.leaves {
            write!(text, " {}..{}", run.begin, run.end).unwrap();
        }
        write!(text, " sequences {:?} rows {}", share.sequences, share.features.rows).unwrap();
        write!(text, " microbatches {} busy {}", share.features.microbatches, share.busy_ps)
            .unwrap();
        writeln!(text, " finish {}", share.finish_ps).unwrap();
        let dummies = [share.dummy_forwards, share.dummy_microbatches, share.dummy_backwards];
        if dummies != [0; 3] {
            writeln!(text, "    dummy forwards, microbatches, backwards {dummies:?}").unwrap();
        }
    }
    if !shares.cut_groups.is_empty() {
        writeln!(text, "groups cut {:?}", shares.cut_groups).unwrap();
    }
    for e in &shares.exchanges {
        let transfer = if e.transfer == ExchangeMode::Send { "sent" } else { "divided" };
        let to = format!("{}..{}", e.to.begin, e.to.end);
        write!(text, "node {} {transfer} from {} to {to}", e.node.0, e.from).unwrap();
        write!(text, " bytes {} and {}", e.kv_bytes, e.gradient_bytes).unwrap();
        writeln!(text, " at {} and {}", e.forward_at, e.backward_at).unwrap();
    }
    for collective in &shares.collectives {
        let shown = match collective {
            Collective::PrefixForward { exchange } => format!("node forward, exchange {exchange}"),
            Collective::Op { op } => format!("{op:?}").to_lowercase(),
            Collective::PrefixBackward { exchange } => {
                format!("node backward, exchange {exchange}")
            }
            Collective::ParameterGradients => "parameter gradients".to_owned(),
            other => panic!("unknown collective {other:?}"),
        };
        writeln!(text, "together: {shown}").unwrap();
    }
    write!(text, "uncut {} largest {}", shares.uncut_ps, shares.largest_ps).unwrap();
    write!(text, " imbalance {:.3}", shares.imbalance).unwrap();
    writeln!(text, " limit {} or {:.3}", shares.limit_ps, shares.limit).unwrap();
    text
}

#[test]
fn scenarios() {
    crate::scenarios("balance", 20, |input| Scenario::parse(input).print());
}
