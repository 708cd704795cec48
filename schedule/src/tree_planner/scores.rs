//! The labels that the rows of each node score.

use crate::forest::{Ending, Forest, Node};
use crate::limits::SCORES_MAX;
use crate::tree_planner::request::{Scoring, check_scoring};
use crate::{NodeId, PlanError, PlanNode, Residency, Span};

/// Returns the number of rows with logits of each node of a forest, as its plan counts them: those that predict a
/// label of any sequence.
///
/// # Errors
/// `Count` unless there is one scoring for each sequence, and for more than [`SCORES_MAX`] scores; `Weight` and
/// `Labels` for a scoring that a plan refuses.
pub fn scored_rows(forest: &Forest, scoring: &[Scoring]) -> Result<Vec<u64>, PlanError> {
    check_scoring(forest, scoring)?;
    let node = |(id, node): (u32, &Node)| PlanNode {
        parent: node.parent,
        rows: node.rows(),
        subtree_end: node.subtree_end,
        sequence: node.sequence,
        origin: NodeId(id),
        residency: Residency::Keep,
    };
    let nodes: Vec<PlanNode> = (0_u32..).zip(forest.nodes()).map(node).collect();
    let same: Vec<u32> = (0..nodes.len() as u32).collect();
    Ok(Scores::new(&nodes, &same, forest.endings(), scoring)?.rows)
}

/// Labels of one sequence that rows of one node predict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scored {
    pub(crate) sequence: u32,
    /// Positions of the labels.
    pub(crate) begin: u32,
    pub(crate) end: u32,
}

/// The labels of each node, by sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scores {
    entries: Vec<Scored>,
    first: Vec<usize>,
    /// Rows with logits of each node.
    pub(crate) rows: Vec<u64>,
}

impl Scores {
    /// Collects labels on the path from the end of each sequence up to its first label. `of` maps the forest's
    /// nodes to those of the plan.
    pub(crate) fn new(
        nodes: &[PlanNode],
        of: &[u32],
        endings: &[Ending],
        scoring: &[Scoring],
    ) -> Result<Self, PlanError> {
        let mut first = vec![0_usize; nodes.len() + 1];
        each(nodes, of, endings, scoring, |node, _| first[node + 1] += 1)?;
        for node in 0..nodes.len() {
            first[node + 1] += first[node];
        }
        let mut entries = vec![Scored::default(); first[nodes.len()]];
        let mut next = first.clone();
        each(nodes, of, endings, scoring, |node, scored| {
            entries[next[node]] = scored;
            next[node] += 1;
        })?;
        let mut scratch = Vec::new();
        let rows = (0..nodes.len())
            .map(|node| {
                let entries = &entries[first[node]..first[node + 1]];
                distinct(entries, nodes[node].rows, &mut scratch)
            })
            .collect();
        Ok(Self { entries, first, rows })
    }

    pub(crate) fn of(&self, node: usize) -> &[Scored] {
        &self.entries[self.first[node]..self.first[node + 1]]
    }
}

/// Calls `visit` for every run of labels that a node predicts, by sequence.
fn each(
    nodes: &[PlanNode],
    of: &[u32],
    endings: &[Ending],
    scoring: &[Scoring],
    mut visit: impl FnMut(usize, Scored),
) -> Result<(), PlanError> {
    let mut steps = 0_usize;
    for ((sequence, ending), scoring) in (0_u32..).zip(endings).zip(scoring) {
        let mut one = Span::default();
        let spans = scoring.spans(ending.tokens, &mut one);
        let Some(lowest) = spans.first().map(|span| span.begin) else { continue };
        // Spans that begin before the end of the node's labels.
        let mut left = spans.len();
        let mut at = of[ending.node.0 as usize];
        while at != NodeId::NONE.0 {
            let node = &nodes[at as usize];
            let labels = Span { begin: node.rows.begin + 1, end: node.rows.end + 1 };
            if labels.end <= lowest {
                break;
            }
            while left > 0 && spans[left - 1].begin >= labels.end {
                left -= 1;
            }
            let mut low = left;
            while low > 0 && spans[low - 1].end > labels.begin {
                low -= 1;
            }
            for span in &spans[low..left] {
                let begin = span.begin.max(labels.begin) as u32;
                let end = span.end.min(labels.end) as u32;
                if begin < end {
                    visit(at as usize, Scored { sequence, begin, end });
                }
            }
            steps += 1 + left - low;
            at = node.parent.map_or(NodeId::NONE.0, |parent| parent.0);
        }
        if steps > SCORES_MAX {
            let accepted = format!("0 to {SCORES_MAX}; use fewer sequences with long paths");
            return Err(PlanError::Count { what: "scores", seen: steps as u64, accepted });
        }
    }
    Ok(())
}

/// Counts the distinct labels of `entries`.
fn distinct(entries: &[Scored], rows: Span, scratch: &mut Vec<(u32, u32)>) -> u64 {
    match entries {
        [] => return 0,
        [one] => return u64::from(one.end - one.begin),
        _ => {}
    }
    if entries.iter().any(|entry| u64::from(entry.end - entry.begin) == rows.count()) {
        return rows.count();
    }
    scratch.clear();
    scratch.extend(entries.iter().map(|entry| (entry.begin, entry.end)));
    scratch.sort_unstable();
    let (mut reached, mut sum) = (0, 0);
    for &(begin, end) in scratch.iter() {
        let begin = begin.max(reached);
        if end > begin {
            sum += u64::from(end - begin);
            reached = end;
        }
    }
    sum
}
