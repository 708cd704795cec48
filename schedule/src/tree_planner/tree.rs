//! The nodes of a plan: the forest's, with long nodes cut into blocks and dense subtrees laid out leaf by
//! leaf; what they score, and their bytes and seconds.

use crate::cost::Flops;
use crate::forest::Forest;
use crate::limits::NODES_MAX;
use crate::tree_planner::cost_model::{CostModel, NodeBytes};
use crate::tree_planner::request::Request;
use crate::tree_planner::scores::{Scored, Scores};
use crate::{NodeId, PlanError, PlanNode, Residency, Span};

const NONE: u32 = NodeId::NONE.0;

/// The nodes of a plan, and their costs.
#[derive(Clone, Debug)]
pub(crate) struct PlanTree {
    pub(crate) nodes: Vec<PlanNode>,
    /// By the forest's number: the last block of the node, or the leaf that contains its rows if it is
    /// planned dense, or [`NONE`] if it has no rows.
    of: Vec<u32>,
    scores: Scores,
    pub(crate) model: CostModel,
}

impl PlanTree {
    /// Lays out the nodes of a request. Subtrees whose first node is in `dense` (by the forest's number) get
    /// one leaf for each of theirs. `block_rows` limits the rows of a node; 0 for no limit.
    pub(crate) fn new(
        request: &Request<'_>,
        dense: &[bool],
        block_rows: u64,
    ) -> Result<Self, PlanError> {
        let forest = request.forest;
        let count = forest.nodes().len();
        let mut tree = Self {
            nodes: Vec::with_capacity(count),
            of: vec![NONE; count],
            scores: Scores::default(),
            model: CostModel::new(request.options),
        };
        let mut id = 0;
        while id < count {
            let node = forest.node(NodeId(id as u32));
            let parent = node.parent.map_or(NONE, |above| tree.of[above.0 as usize]);
            let end = if dense.get(id).is_some_and(|dense| *dense) {
                tree.separate(forest, id, parent, block_rows)?;
                node.subtree_end as usize
            } else {
                tree.of[id] = tree.chain(id, parent, node.sequence, node.rows(), block_rows)?;
                id + 1
            };
            id = end;
        }
        for id in (0..tree.nodes.len()).rev() {
            if let Some(parent) = tree.nodes[id].parent {
                let end = tree.nodes[id].subtree_end;
                let above = &mut tree.nodes[parent.0 as usize].subtree_end;
                *above = end.max(*above);
            }
        }
        tree.scores = Scores::new(&tree.nodes, &tree.of, forest.endings(), request.scoring)?;
        Ok(tree)
    }

    /// Adds a leaf for each leaf below `top`, with all rows from `top` on. Inner nodes map to the first leaf
    /// below them.
    fn separate(
        &mut self,
        forest: &Forest,
        top: usize,
        parent: u32,
        block_rows: u64,
    ) -> Result<(), PlanError> {
        let begin = forest.node(NodeId(top as u32)).rows().begin;
        let mut waiting = top;
        for id in top..forest.node(NodeId(top as u32)).subtree_end as usize {
            if !forest.is_leaf(NodeId(id as u32)) {
                continue;
            }
            let node = forest.node(NodeId(id as u32));
            let rows = Span { begin, end: node.rows().end };
            let leaf = self.chain(id, parent, node.sequence, rows, block_rows)?;
            self.of[waiting..=id].fill(leaf);
            waiting = id + 1;
        }
        Ok(())
    }

    /// Adds a chain of nearly equal nodes of at most `block_rows` rows and returns the last.
    fn chain(
        &mut self,
        origin: usize,
        mut parent: u32,
        sequence: u32,
        rows: Span,
        block_rows: u64,
    ) -> Result<u32, PlanError> {
        let count = rows.count();
        let blocks =
            if block_rows == 0 { u64::from(count > 0) } else { count.div_ceil(block_rows) };
        if self.nodes.len() as u64 + blocks > NODES_MAX as u64 {
            let seen = self.nodes.len() as u64 + blocks;
            let accepted = format!("1 to {NODES_MAX}, blocks of a node counted each");
            return Err(PlanError::Count { what: "nodes", seen, accepted });
        }
        for block in 0..blocks {
            let cut =
                |block: u64| rows.begin + count / blocks * block + (count % blocks).min(block);
            let id = self.nodes.len() as u32;
            self.nodes.push(PlanNode {
                parent: (parent != NONE).then_some(NodeId(parent)),
                rows: Span { begin: cut(block), end: cut(block + 1) },
                subtree_end: id + 1,
                sequence,
                origin: NodeId(origin as u32),
                residency: Residency::Keep,
            });
            parent = id;
        }
        // Without blocks (a root of one token) the children read nothing.
        Ok(parent)
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn is_leaf(&self, id: usize) -> bool {
        self.nodes[id].subtree_end as usize == id + 1
    }

    /// Returns all nodes with children.
    pub(crate) fn inner_nodes(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..self.len()).filter(|id| !self.is_leaf(*id))
    }

    pub(crate) fn rows(&self, id: usize) -> u64 {
        self.nodes[id].rows.count()
    }

    /// Returns the number of rows with logits.
    pub(crate) fn scored_rows(&self, id: usize) -> u64 {
        self.scores.rows[id]
    }

    pub(crate) fn scores_of(&self, id: usize) -> &[Scored] {
        self.scores.of(id)
    }

    pub(crate) fn node_bytes(&self, id: usize) -> NodeBytes {
        self.model.node_bytes(self.rows(id), self.scored_rows(id))
    }

    pub(crate) fn node_flops(&self, id: usize) -> Flops {
        self.model.node_flops(self.nodes[id].rows, self.scored_rows(id))
    }

    pub(crate) fn leaf_bytes(&self, leaf: usize) -> u64 {
        self.model.leaf_bytes(self.rows(leaf), self.scored_rows(leaf))
    }

    pub(crate) fn leaf_flops(&self, leaf: usize) -> Flops {
        self.model.leaf_flops(self.nodes[leaf].rows, self.scored_rows(leaf))
    }

    /// Returns the parent of a node, or `len()` for a root.
    pub(crate) fn above(&self, id: usize) -> usize {
        self.nodes[id].parent.map_or(self.nodes.len(), |parent| parent.0 as usize)
    }

    /// Returns the children with children of a node, or the roots with children for `len()`, in order.
    pub(crate) fn inner_children(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        let (begin, end) = match self.nodes.get(id) {
            Some(node) => (id + 1, node.subtree_end as usize),
            None => (0, id),
        };
        let first = (begin < end).then_some(begin);
        std::iter::successors(first, move |child| {
            let next = self.nodes[*child].subtree_end as usize;
            (next < end).then_some(next)
        })
        .filter(|child| !self.is_leaf(*child))
    }
}
