//! Scenarios of forests: `tests/testdata/forest/*.txt`, each a batch, operations on it, and the results.
//!
//! `sequence abc` has its letters as ids, `sequence abc kind 1` is of another kind; `node PARENT
//! LENGTH` and `end NODE TOKENS` give lengths only. Then `leaves FROM TO` and `pick SEQUENCES`,
//! which print a part of the forest, and `grow`, which prints the forest after every sequence.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.

use std::fmt::Write as _;

use crate::forest::sequences_of_leaves;
use dormouse_schedule::forest::{Ending, Forest, GrowingForest, NO_PARENT, Part};
use dormouse_schedule::{NodeId, PlanError};

const VOCAB: u32 = 128;

#[derive(Debug, Default)]
struct Case {
    sequences: Vec<String>,
    kinds: Vec<u64>,
    parents: Vec<u32>,
    lengths: Vec<u64>,
    endings: Vec<Ending>,
    /// Operations on the forest.
    asked: Vec<(String, Vec<u64>)>,
}

fn numbers(text: &str) -> Vec<u64> {
    text.split_whitespace().map(|number| number.parse().unwrap()).collect()
}

fn parse(text: &str) -> Case {
    let mut case = Case::default();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once(' ').unwrap_or((line, ""));
        match key {
            "sequence" => {
                let (letters, kind) = value.split_once(" kind ").unwrap_or((value, "0"));
                case.sequences.push(letters.to_owned());
                case.kinds.push(kind.parse().unwrap());
            }
            "node" => {
                let (parent, length) = value.split_once(' ').unwrap();
                case.parents.push(parent.parse().unwrap_or(NO_PARENT));
                case.lengths.push(length.parse().unwrap());
            }
            "end" => {
                let (node, tokens) = value.split_once(' ').unwrap();
                let node = NodeId(node.parse().unwrap());
                case.endings.push(Ending { node, tokens: tokens.parse().unwrap() });
            }
            "leaves" | "pick" | "grow" => {
                case.asked.push((key.to_owned(), numbers(value)));
            }
            other => panic!("unknown line {other:?}"),
        }
    }
    case
}

impl Case {
    fn forest(&self) -> Result<Forest, PlanError> {
        if self.sequences.is_empty() && self.endings.is_empty() {
            return Forest::from_nodes(&self.parents, &self.lengths);
        }
        if self.sequences.is_empty() {
            return Forest::from_nodes_with(&self.parents, &self.lengths, &self.endings);
        }
        let ids: Vec<i32> = self.sequences.concat().bytes().map(i32::from).collect();
        let mut offsets = vec![0];
        for sequence in &self.sequences {
            offsets.push(offsets.last().unwrap() + sequence.len() as u64);
        }
        Forest::from_ids(&ids, &offsets, &self.kinds, VOCAB)
    }

    /// The letters of a node, or a dot per token; `numbers` maps its sequences to those of the case.
    fn letters(&self, numbers: &[u32], node: &dormouse_schedule::forest::Node) -> String {
        let (begin, end) = (node.tokens.begin as usize, node.tokens.end as usize);
        match self.sequences.get(numbers[node.sequence as usize] as usize) {
            Some(letters) => letters[begin..end].to_owned(),
            None => ".".repeat(end - begin),
        }
    }

    fn print(&self, forest: &Forest, numbers: &[u32], of: Option<&[NodeId]>) -> String {
        let mut text = String::new();
        let through = |node: usize| {
            let subtree = node as u32..forest.nodes()[node].subtree_end;
            forest.endings().iter().filter(|ending| subtree.contains(&ending.node.0)).count()
        };
        let order = forest.sequences_by_ending();
        for (id, node) in forest.nodes().iter().enumerate() {
            let depth = forest.path(NodeId(id as u32)).count() - 1;
            let rows = node.rows();
            let letters = self.letters(numbers, node);
            write!(text, "{}{id} {letters}", "  ".repeat(depth)).unwrap();
            if let Some(of) = of {
                write!(text, " of {}", of[id].0).unwrap();
            }
            write!(text, ", rows {}..{}, {} through", rows.begin, rows.end, through(id)).unwrap();
            for at in order.iter().filter(|at| forest.endings()[**at as usize].node.0 == id as u32)
            {
                let tokens = forest.endings()[*at as usize].tokens;
                write!(text, "; {} ends at {tokens}", numbers[*at as usize]).unwrap();
            }
            text.push('\n');
        }
        // Nodes between two leaves are on the path of the second only.
        let mut new = 0;
        for (id, node) in (0..).zip(forest.nodes()) {
            new += node.tokens.count();
            if forest.is_leaf(NodeId(id)) {
                writeln!(text, "leaf {id}: {} tokens, {new} new", node.tokens.end).unwrap();
                new = 0;
            }
        }
        let (tree, dense) = (forest.tree_tokens(), forest.dense_tokens());
        writeln!(text, "{tree} tokens of {dense}: {:.3}", forest.compression()).unwrap();
        text
    }

    fn print_part(&self, part: Result<Part, PlanError>) -> String {
        match part {
            Ok(part) => self.print(&part.forest, &part.sequences, Some(&part.nodes)),
            Err(error) => format!("refused: {error}\n"),
        }
    }

    fn answer(&self, forest: &Forest, key: &str, values: &[u64]) -> String {
        let own: Vec<u32> = (0..forest.endings().len() as u32).collect();
        match key {
            "leaves" => {
                let picks = sequences_of_leaves(forest, values[0] as usize..values[1] as usize);
                self.print_part(forest.part_of_sequences(&picks))
            }
            "pick" => {
                let picks: Vec<u32> = values.iter().map(|pick| *pick as u32).collect();
                self.print_part(forest.part_of_sequences(&picks))
            }
            _ => self.grow(&own),
        }
    }

    fn grow(&self, own: &[u32]) -> String {
        let mut text = String::new();
        let mut growing = GrowingForest::new(VOCAB).unwrap();
        for (letters, kind) in self.sequences.iter().zip(&self.kinds) {
            let ids: Vec<i64> = letters.bytes().map(i64::from).collect();
            let added = growing.add(&ids, *kind).unwrap();
            writeln!(text, "with {added}").unwrap();
            text.push_str(&self.print(&growing.freeze(), own, None));
        }
        text
    }

    fn outcome(&self) -> String {
        let forest = match self.forest() {
            Ok(forest) => forest,
            Err(error) => return format!("refused: {error}\n"),
        };
        let own: Vec<u32> = (0..forest.endings().len() as u32).collect();
        let mut text = self.print(&forest, &own, None);
        for (key, values) in &self.asked {
            write!(text, "\n{key}").unwrap();
            values.iter().for_each(|value| write!(text, " {value}").unwrap());
            text.push('\n');
            text.push_str(&self.answer(&forest, key, values));
        }
        text
    }
}

#[test]
fn scenarios() {
    crate::scenario_files::scenarios("forest", 10, |input| parse(input).outcome());
}
