//! The collectives of a microbatch in order, and their bytes.

use super::{
    ContextError, Flow, Gathered, KvExchange, KvExchangeOptions, KvPrice, KvShape, KvTransfer,
    KvTransferKind, KvWay, Mark, OpEdge, Pass, Reduced, Shards,
};
use dormouse_schedule::{LAYERS_MAX, check_range};

/// Maximum bytes of K and V of one row, or of their gradients.
const ROW_BYTES_MAX: u64 = 1 << 30;
/// Gathered layers alive at once if released after use: the current layer and the next.
const VIEWS_AHEAD: u64 = 2;
/// Blocks of a ring on a rank besides its own: the one that is read and the one that arrives.
const RING_BLOCKS: u64 = 2;

impl Flow {
    fn of(shards: &Shards, shape: &KvShape) -> Self {
        let each = |row_bytes| shards.ranks.iter().map(move |shard| shard.rows * row_bytes);
        Self {
            kv_bytes_from: each(shape.row_bytes).collect(),
            gradient_bytes_to: each(shape.gradient_row_bytes).collect(),
            kv_bytes_sent: shards.rank_rows * shape.row_bytes,
            gradient_bytes_sent: shards.rank_rows * shape.gradient_row_bytes,
        }
    }
}

impl KvExchange {
    /// Plans the exchanges of a microbatch that reads a prefix, both sharded over the same group; a prefix
    /// itself reads its ancestors or nothing ([`Shards::none`]). A group of one rank exchanges nothing.
    ///
    /// # Errors
    /// [`ContextError::Groups`] for different groups, [`ContextError::Count`] for a shape out of range.
    pub fn of(
        prefix: &Shards,
        microbatch: &Shards,
        shape: &KvShape,
        options: &KvExchangeOptions,
    ) -> Result<Self, ContextError> {
        let ranks = prefix.ranks.len();
        if microbatch.ranks.len() != ranks {
            return Err(ContextError::Groups { prefix: ranks, microbatch: microbatch.ranks.len() });
        }
        check_range("layers", shape.layers, 1, LAYERS_MAX)?;
        check_range("row_bytes", shape.row_bytes, 1, ROW_BYTES_MAX)?;
        check_range("gradient_row_bytes", shape.gradient_row_bytes, 1, ROW_BYTES_MAX)?;
        let (prefix, own) = (Flow::of(prefix, shape), Flow::of(microbatch, shape));
        let mut exchange = Self { prefix, own, ..Self::default() };
        if ranks < 2 {
            return Ok(exchange);
        }
        exchange.forward(shape.layers);
        exchange.backward(shape.layers, options);
        exchange.microbatch_bytes =
            exchange.transfers.iter().fold(0, |sum, one| sum.saturating_add(one.received_bytes));
        exchange.set_peaks(ranks as u64, shape.layers.into(), options);
        exchange.set_prices(ranks as u64, shape.layers.into(), options);
        Ok(exchange)
    }

    fn forward(&mut self, layers: u32) {
        let mark = |layer, edge| Mark { pass: Pass::Forward, layer, edge };
        for layer in 0..layers {
            // The first gather is issued at the start, each other one layer ahead.
            if layer == 0 {
                let (issue, due) = (mark(0, OpEdge::Begin), mark(0, OpEdge::Attention));
                self.send(KvTransferKind::GatherPrefix, 0, issue, due);
            }
            if layer + 1 < layers {
                let (issue, due) = (mark(layer, OpEdge::Begin), mark(layer + 1, OpEdge::Attention));
                self.send(KvTransferKind::GatherPrefix, layer + 1, issue, due);
            }
            let (issue, due) = (mark(layer, OpEdge::KvMade), mark(layer, OpEdge::Attention));
            self.send(KvTransferKind::GatherOwn, layer, issue, due);
        }
    }

    fn backward(&mut self, layers: u32, options: &KvExchangeOptions) {
        let mark = |layer, edge| Mark { pass: Pass::Backward, layer, edge };
        for layer in (0..layers).rev() {
            // The last layer's view is still alive: its backward follows its forward.
            if options.gathered == Gathered::Again && layer > 0 {
                let (issue, due) = (mark(layer, OpEdge::Begin), mark(layer - 1, OpEdge::Attention));
                self.send(KvTransferKind::GatherPrefix, layer - 1, issue, due);
                self.send(KvTransferKind::GatherOwn, layer - 1, issue, due);
            }
            let issue = mark(layer, OpEdge::AttentionDone);
            self.send(KvTransferKind::ReduceOwn, layer, issue, mark(layer, OpEdge::Projections));
            match options.reduced {
                Reduced::EachMicrobatch => {
                    self.send(KvTransferKind::ReducePrefix, layer, issue, mark(0, OpEdge::End));
                }
                Reduced::BeforeC => {
                    let due = mark(layer, OpEdge::Begin);
                    let last = self.transfer(KvTransferKind::ReducePrefix, layer, issue, due);
                    self.before_c.extend(last);
                }
            }
        }
    }

    fn send(&mut self, kind: KvTransferKind, layer: u32, issue: Mark, due: Mark) {
        let transfer = self.transfer(kind, layer, issue, due);
        self.transfers.extend(transfer);
    }

    /// Returns `None` if the prefix has no rows.
    fn transfer(
        &self,
        kind: KvTransferKind,
        layer: u32,
        issue: Mark,
        due: Mark,
    ) -> Option<KvTransfer> {
        let others = self.prefix.kv_bytes_from.len() as u64 - 1;
        let one = match kind {
            KvTransferKind::GatherPrefix => self.prefix.kv_bytes_sent,
            KvTransferKind::GatherOwn => self.own.kv_bytes_sent,
            KvTransferKind::ReducePrefix => self.prefix.gradient_bytes_sent,
            KvTransferKind::ReduceOwn => self.own.gradient_bytes_sent,
        };
        let received_bytes = one.saturating_mul(others);
        (one > 0).then_some(KvTransfer { layer, kind, issue, due, received_bytes })
    }

    fn set_peaks(&mut self, ranks: u64, layers: u64, options: &KvExchangeOptions) {
        let views = match options.gathered {
            Gathered::Kept => layers,
            Gathered::Again => layers.min(VIEWS_AHEAD),
        };
        let view = (self.prefix.kv_bytes_sent + self.own.kv_bytes_sent).saturating_mul(ranks);
        self.gathered_peak_bytes = view.saturating_mul(views);
        let wholes = match options.reduced {
            // One layer is reduced while the next is filled.
            Reduced::EachMicrobatch => layers.min(VIEWS_AHEAD),
            Reduced::BeforeC => layers,
        };
        let prefix = self.prefix.gradient_bytes_sent.saturating_mul(ranks).saturating_mul(wholes);
        let own = self.own.gradient_bytes_sent.saturating_mul(ranks);
        self.gradient_peak_bytes = prefix.saturating_add(own);
    }

    fn set_prices(&mut self, ranks: u64, layers: u64, options: &KvExchangeOptions) {
        let all_gather = KvPrice {
            way: KvWay::AllGather,
            received_bytes: self.microbatch_bytes,
            held_bytes: self.gathered_peak_bytes.saturating_add(self.gradient_peak_bytes),
        };
        let kv = self.prefix.kv_bytes_sent + self.own.kv_bytes_sent;
        let gradients = self.prefix.gradient_bytes_sent + self.own.gradient_bytes_sent;
        // K and V visit the other ranks in each pass. An accumulator leaves its owner with them and returns.
        let of_layer =
            kv.saturating_mul(2 * (ranks - 1)).saturating_add(gradients.saturating_mul(ranks));
        let blocks = RING_BLOCKS.min(ranks - 1);
        let ring = KvPrice {
            way: KvWay::Ring,
            received_bytes: of_layer.saturating_mul(layers),
            held_bytes: (kv * blocks).saturating_add(gradients * RING_BLOCKS),
        };
        self.prices = vec![all_gather, ring];
        let fits = |price: &KvPrice| options.room_bytes.is_none_or(|room| price.held_bytes <= room);
        let cheapest =
            self.prices.iter().filter(|price| fits(price)).min_by_key(|it| it.received_bytes);
        let smallest = self.prices.iter().min_by_key(|price| price.held_bytes);
        self.way = cheapest.or(smallest).map_or(KvWay::AllGather, |price| price.way);
    }
}
