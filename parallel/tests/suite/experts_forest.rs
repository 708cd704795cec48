//! Forests by definition: a node continues while all unfinished sequences have the same token.

use dormouse_schedule::forest::{Ending, Forest, NO_PARENT};
use serde_json::{Value, json};

/// The forest of sequences of token ids. A node has at most `block` tokens, so that sequences end at the ends
/// of nodes with children.
pub(crate) fn forest(sequences: &[Vec<u8>], block: usize) -> Forest {
    let mut nodes: Vec<Value> = Vec::new();
    let mut endings: Vec<Value> = vec![Value::Null; sequences.len()];
    let all: Vec<usize> = (0..sequences.len()).collect();
    grow(sequences, block, &all, 0, None, &mut nodes, &mut endings);
    let parent = |node: &Value| node["parent"].as_u64().map_or(NO_PARENT, |parent| parent as u32);
    let length = |node: &Value| {
        node["tokens"]["end"].as_u64().unwrap() - node["tokens"]["begin"].as_u64().unwrap()
    };
    let parents: Vec<u32> = nodes.iter().map(parent).collect();
    let lengths: Vec<u64> = nodes.iter().map(length).collect();
    let endings: Vec<Ending> =
        endings.into_iter().map(|ending| serde_json::from_value(ending).unwrap()).collect();
    Forest::from_nodes_with(&parents, &lengths, &endings).unwrap()
}

fn grow(
    sequences: &[Vec<u8>],
    block: usize,
    members: &[usize],
    begin: usize,
    parent: Option<usize>,
    nodes: &mut Vec<Value>,
    endings: &mut [Value],
) {
    for first in 0..=u8::MAX {
        let next = |member: &usize, at: usize| sequences[*member].get(at).copied();
        let mut left: Vec<usize> =
            members.iter().copied().filter(|one| next(one, begin) == Some(first)).collect();
        if left.is_empty() {
            continue;
        }
        let id = nodes.len();
        nodes.push(Value::Null);
        let sequence = left[0];
        let mut end = begin + 1;
        loop {
            left.retain(|member| {
                let ends = sequences[*member].len() == end;
                if ends {
                    endings[*member] = json!({ "node": id, "tokens": end });
                }
                !ends
            });
            let agree = left.windows(2).all(|two| next(&two[0], end) == next(&two[1], end));
            if left.is_empty() || !agree || end - begin == block {
                break;
            }
            end += 1;
        }
        grow(sequences, block, &left, end, Some(id), nodes, endings);
        nodes[id] = json!({
            "parent": parent,
            "tokens": { "begin": begin, "end": end },
            "subtree_end": nodes.len(),
            "sequence": sequence,
        });
    }
}

/// The node and position of a sequence's row. A row belongs to the node of its label; a sequence's last row
/// has no label and belongs to the node in which the sequence ends.
pub(crate) fn physical(forest: &Forest, sequence: usize, row: u64) -> (u32, u64) {
    let ending = forest.endings()[sequence];
    let label = (row + 1).min(ending.tokens - 1);
    let holds = |id: &dormouse_schedule::NodeId| {
        let tokens = forest.node(*id).tokens;
        (tokens.begin..tokens.end).contains(&label)
    };
    (forest.path(ending.node).find(holds).unwrap().0, row)
}
