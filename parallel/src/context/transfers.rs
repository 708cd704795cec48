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

impl KvShape {
    fn accumulators(&self) -> u64 {
        self.accumulator_row_bytes.unwrap_or(self.gradient_row_bytes)
    }
}

impl Flow {
    fn of(shards: &Shards, shape: &KvShape) -> Self {
        let each = |row_bytes| shards.ranks.iter().map(move |shard| shard.rows * row_bytes);
        Self {
            kv_bytes_from: each(shape.row_bytes).collect(),
            gradient_bytes_to: each(shape.gradient_row_bytes).collect(),
            kv_bytes_sent: shards.rank_rows * shape.row_bytes,
            gradient_bytes_sent: shards.rank_rows * shape.gradient_row_bytes,
            accumulator_bytes: shards.rank_rows * shape.accumulators(),
        }
    }
}

impl KvExchange {
    /// Plans the exchanges of a microbatch that reads a prefix, both sharded over the same group; a prefix
    /// itself reads its ancestors or nothing ([`Shards::none`]). Nor has a microbatch shards whose sequences
    /// are whole on their ranks: it exchanges the prefix's alone. A group of one rank exchanges nothing.
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
        check_range("accumulator_row_bytes", shape.accumulators(), 1, ROW_BYTES_MAX)?;
        let (prefix, own) = (Flow::of(prefix, shape), Flow::of(microbatch, shape));
        let mut exchange = Self { prefix, own, ..Self::default() };
        if ranks < 2 {
            return Ok(exchange);
        }
        let (ranks, layers) = (ranks as u64, shape.layers);
        exchange.gather(layers);
        exchange.reduce(layers, options);
        exchange.set_peaks(ranks, layers.into(), options);
        exchange.set_prices(ranks, layers.into(), options);
        if exchange.way == KvWay::Ring {
            exchange.go_round(ranks, layers);
        }
        exchange.microbatch_bytes = exchange.received_bytes();
        Ok(exchange)
    }

    fn gather(&mut self, layers: u32) {
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

    fn reduce(&mut self, layers: u32, options: &KvExchangeOptions) {
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

    /// Lists a ring in the place of the collectives.
    fn go_round(&mut self, ranks: u64, layers: u32) {
        (self.transfers, self.before_c) = (Vec::new(), Vec::new());
        let mark = |pass, layer, edge| Mark { pass, layer, edge };
        for layer in 0..layers {
            let at = |edge| mark(Pass::Forward, layer, edge);
            let due = at(OpEdge::AttentionDone);
            self.send(KvTransferKind::RingPrefix, layer, at(OpEdge::Begin), due);
            self.send(KvTransferKind::RingOwn, layer, at(OpEdge::KvMade), due);
        }
        for layer in (0..layers).rev() {
            let at = |edge| mark(Pass::Backward, layer, edge);
            let (issue, due) = (at(OpEdge::Begin), at(OpEdge::AttentionDone));
            self.send(KvTransferKind::RingPrefix, layer, issue, due);
            self.send(KvTransferKind::RingOwn, layer, issue, due);
            // The first accumulators leave their owners before attention has read the other blocks.
            let (issue, end) = (at(OpEdge::Attention), mark(Pass::Backward, 0, OpEdge::End));
            self.send(KvTransferKind::ReturnOwn, layer, issue, at(OpEdge::Projections));
            self.send(KvTransferKind::ReturnPrefix, layer, issue, end);
        }
        (self.gathered_peak_bytes, self.gradient_peak_bytes) = self.passing(ranks);
    }

    /// Peak bytes of the blocks of a ring that are on a rank, and of their accumulators.
    fn passing(&self, ranks: u64) -> (u64, u64) {
        let kv = self.prefix.kv_bytes_sent + self.own.kv_bytes_sent;
        let accumulators = self.prefix.accumulator_bytes + self.own.accumulator_bytes;
        (kv * RING_BLOCKS.min(ranks - 1), accumulators * RING_BLOCKS)
    }

    /// Sum over the listed transfers of a microbatch.
    fn received_bytes(&self) -> u64 {
        self.transfers.iter().fold(0, |sum, one| sum.saturating_add(one.received_bytes))
    }

    fn send(&mut self, kind: KvTransferKind, layer: u32, issue: Mark, due: Mark) {
        let transfer = self.transfer(kind, layer, issue, due);
        self.transfers.extend(transfer);
    }

    /// Returns `None` if there are no rows to exchange.
    fn transfer(
        &self,
        kind: KvTransferKind,
        layer: u32,
        issue: Mark,
        due: Mark,
    ) -> Option<KvTransfer> {
        use KvTransferKind as Kind;
        let ranks = self.prefix.kv_bytes_from.len() as u64;
        let (one, times) = match kind {
            Kind::GatherPrefix | Kind::RingPrefix => (self.prefix.kv_bytes_sent, ranks - 1),
            Kind::GatherOwn | Kind::RingOwn => (self.own.kv_bytes_sent, ranks - 1),
            Kind::ReducePrefix => (self.prefix.gradient_bytes_sent, ranks - 1),
            Kind::ReduceOwn => (self.own.gradient_bytes_sent, ranks - 1),
            // An accumulator that has visited all ranks goes one hop further, home.
            Kind::ReturnPrefix => (self.prefix.accumulator_bytes, ranks),
            Kind::ReturnOwn => (self.own.accumulator_bytes, ranks),
        };
        let received_bytes = one.saturating_mul(times);
        (one > 0).then_some(KvTransfer { layer, kind, issue, due, received_bytes })
    }

    fn set_peaks(&mut self, ranks: u64, layers: u64, options: &KvExchangeOptions) {
        let views = match options.gathered {
            Gathered::Kept => layers,
            Gathered::Again => layers.min(VIEWS_AHEAD),
        };
        let view = (self.prefix.kv_bytes_sent + self.own.kv_bytes_sent).saturating_mul(ranks);
        self.gathered_peak_bytes = view.saturating_mul(views);
        let prefix = match options.reduced {
            // One layer is reduced while the next is filled.
            Reduced::EachMicrobatch => {
                self.prefix.gradient_bytes_sent.saturating_mul(layers.min(VIEWS_AHEAD))
            }
            Reduced::BeforeC => self.prefix.accumulator_bytes.saturating_mul(layers),
        };
        let of_rank = prefix.saturating_add(self.own.gradient_bytes_sent);
        self.gradient_peak_bytes = of_rank.saturating_mul(ranks);
    }

    fn set_prices(&mut self, ranks: u64, layers: u64, options: &KvExchangeOptions) {
        let all_gather = KvPrice {
            way: KvWay::AllGather,
            received_bytes: self.received_bytes(),
            held_bytes: self.gathered_peak_bytes.saturating_add(self.gradient_peak_bytes),
        };
        let kv = self.prefix.kv_bytes_sent + self.own.kv_bytes_sent;
        let accumulators = self.prefix.accumulator_bytes + self.own.accumulator_bytes;
        // K and V visit the other ranks in each pass. An accumulator leaves its owner with them and returns.
        let of_layer =
            kv.saturating_mul(2 * (ranks - 1)).saturating_add(accumulators.saturating_mul(ranks));
        let (blocks, of_blocks) = self.passing(ranks);
        let ring = KvPrice {
            way: KvWay::Ring,
            received_bytes: of_layer.saturating_mul(layers),
            held_bytes: blocks.saturating_add(of_blocks),
        };
        self.prices = vec![all_gather, ring];
        let fits = |price: &KvPrice| options.room_bytes.is_none_or(|room| price.held_bytes <= room);
        let cheapest =
            self.prices.iter().filter(|price| fits(price)).min_by_key(|it| it.received_bytes);
        let smallest = self.prices.iter().min_by_key(|price| price.held_bytes);
        let chosen = cheapest.or(smallest).map_or(KvWay::AllGather, |price| price.way);
        self.way = options.way.unwrap_or(chosen);
    }
}
