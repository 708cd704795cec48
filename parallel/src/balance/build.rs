//! Construction of shares: placement, features, costs, order of collectives.

use std::collections::{BTreeMap, BTreeSet};

use super::collective_order::{CollectiveOrder, PassKind, rank_passes};
use super::cut::Segments;
use super::leaves::{Leaves, starts};
use super::place::{costs_by_part, fill, longest_first, unit_costs, visit_parts};
use super::prefix_exchange::{ExchangeChoice, ExchangePlan, SharedNode};
use super::search::with_exchange;
use super::{
    BalanceError, BalanceMethod, BalanceOptions, BalanceUnit, Collective, ExchangeMode,
    PrefixExchange, RankShare, SHARES_VERSION, Shares, Workload, limit,
};
use dormouse_schedule::cost::{Features, logit_rows_of};
use dormouse_schedule::{NodeId, Span, check_range};

impl Shares {
    /// Computes the shares of a batch. Deterministic: equal input gives equal shares on every rank.
    ///
    /// # Errors
    /// See [`BalanceError`].
    pub fn new(batch: &Workload<'_>, options: &BalanceOptions) -> Result<Self, BalanceError> {
        options.check(batch)?;
        if options.unit == BalanceUnit::GroupOrLeaf {
            let cut = Self::new(batch, &BalanceOptions { unit: BalanceUnit::Leaf, ..*options })?;
            let whole = Self::new(batch, &BalanceOptions { unit: BalanceUnit::Group, ..*options })?;
            let (limit_ps, limit) = (cut.limit_ps, cut.limit);
            let best = if cut.largest_ps < whole.largest_ps { cut } else { whole };
            return Ok(Self { limit_ps, limit, ..best });
        }
        let forest = batch.forest;
        let full =
            options.rates.node_costs_ps(forest, batch.logit_rows, options.microbatch_tokens)?;
        let uncut_ps: u64 = full.iter().sum();
        if uncut_ps == 0 {
            return Err(BalanceError::Free);
        }
        let leaves = Leaves::of(forest);
        let units = leaves.units(batch, options.unit);
        let starts = starts(&units);
        let segments = Segments::new(&leaves, &full, &full);
        let contiguous = |ends: Vec<u32>| (ranks_of(&ends), None);
        // With exchange a unit has only the nodes that no other needs.
        let unit_ps = match options.exchange {
            true => Vec::new(),
            false => unit_costs(&leaves, &units, options.unit == BalanceUnit::Leaf, &full)?,
        };
        let (rank_of_leaf, plan) = match options.method {
            BalanceMethod::Contiguous if options.exchange => {
                let plan = with_exchange(&leaves, &full, &starts, options);
                (ranks_of(&plan.ends), Some(plan))
            }
            BalanceMethod::Contiguous => contiguous(segments.cut(&starts, options.ranks)),
            BalanceMethod::Greedy => contiguous(fill(&segments, &starts, options.ranks)),
            BalanceMethod::LongestFirst => (longest_first(&units, &unit_ps, options.ranks), None),
        };
        let limit_ps = if options.exchange {
            limit::largest_unit(&leaves, &units, &full)
                .max(uncut_ps.div_ceil(u64::from(options.ranks)))
        } else {
            let unit = unit_ps.into_iter().max().unwrap_or(0);
            unit.max(limit::least_largest(&leaves, &full, &full, options.ranks))
        };
        let mut shares = Self {
            version: SHARES_VERSION,
            shares: vec![RankShare::default(); options.ranks as usize],
            uncut_ps,
            largest_ps: 0,
            imbalance: 0.0,
            limit_ps,
            limit: 0.0,
            cut_groups: Vec::new(),
            exchanges: Vec::new(),
            collectives: Vec::new(),
            collective_order: CollectiveOrder::default(),
        };
        shares.hand_out(&leaves, &rank_of_leaf, batch.groups);
        shares.count(batch, &leaves, &rank_of_leaf)?;
        shares.spend(&leaves, &rank_of_leaf, &full, plan.as_ref())?;
        shares.order(&leaves, plan.as_ref(), options);
        Ok(shares)
    }

    /// Assigns leaves and sequences to their ranks.
    fn hand_out(&mut self, leaves: &Leaves<'_>, rank_of_leaf: &[u32], groups: &[u32]) {
        for (leaf, rank) in (0_u64..).zip(rank_of_leaf) {
            let runs = &mut self.shares[*rank as usize].leaves;
            match runs.last_mut() {
                Some(run) if run.end == leaf => run.end += 1,
                _ => runs.push(Span { begin: leaf, end: leaf + 1 }),
            }
        }
        for (leaf, sequence) in &leaves.sequences {
            let rank = rank_of_leaf[*leaf as usize];
            self.shares[rank as usize].sequences.push(*sequence);
        }
        let mut homes: BTreeMap<u32, (u32, bool)> = BTreeMap::new();
        for (leaf, sequence) in leaves.sequences.iter().filter(|_| !groups.is_empty()) {
            let rank = rank_of_leaf[*leaf as usize];
            let home = homes.entry(groups[*sequence as usize]).or_insert((rank, false));
            home.1 |= home.0 != rank;
        }
        let cut = homes.into_iter().filter(|(_, (_, cut))| *cut);
        self.cut_groups = cut.map(|(group, _)| group).collect();
    }

    fn count(
        &mut self,
        batch: &Workload<'_>,
        leaves: &Leaves<'_>,
        rank_of_leaf: &[u32],
    ) -> Result<(), BalanceError> {
        let forest = batch.forest;
        let of_node = |id: u32| {
            let (node, id) = (forest.node(NodeId(id)), NodeId(id));
            let rows = logit_rows_of(forest, batch.logit_rows, id)?;
            Ok::<_, BalanceError>(Features::of_node(node, forest.is_leaf(id), rows))
        };
        let counts: Vec<Features> =
            (0..forest.nodes().len() as u32).map(of_node).collect::<Result<_, _>>()?;
        visit_parts(leaves, rank_of_leaf, |rank, node| {
            let features = &mut self.shares[rank].features;
            *features = features.plus(counts[node.0 as usize]);
        })
    }

    fn spend(
        &mut self,
        leaves: &Leaves<'_>,
        rank_of_leaf: &[u32],
        full: &[u64],
        plan: Option<&ExchangePlan<'_>>,
    ) -> Result<(), BalanceError> {
        let costs = costs_by_part(leaves, rank_of_leaf, full)?;
        for (share, cost) in self.shares.iter_mut().zip(costs) {
            (share.alone_ps, share.busy_ps, share.finish_ps) = (cost, cost, cost);
        }
        if let Some(plan) = plan {
            for (share, load) in self.shares.iter_mut().zip(plan.finish()) {
                (share.busy_ps, share.finish_ps) = (load.busy_ps, load.finish_ps);
            }
        }
        let even = self.uncut_ps as f64 / self.shares.len() as f64;
        self.largest_ps = self.shares.iter().map(|share| share.finish_ps).max().unwrap_or(0);
        self.imbalance = self.largest_ps as f64 / even;
        self.limit = self.limit_ps as f64 / even;
        Ok(())
    }

    /// Determines the exchanges and the order of all collectives.
    fn order(
        &mut self,
        leaves: &Leaves<'_>,
        plan: Option<&ExchangePlan<'_>>,
        options: &BalanceOptions,
    ) {
        self.exchanges = plan.map(exchanges).unwrap_or_default();
        let apart: BTreeSet<u32> = self.exchanges.iter().map(|e| e.node.0).collect();
        let passes: Vec<Vec<PassKind>> = self
            .shares
            .iter()
            .map(|share| {
                let own = share.leaves.iter().flat_map(|run| run.begin as u32..run.end as u32);
                rank_passes(leaves, own, options.microbatch_tokens, &apart)
            })
            .collect();
        self.count_microbatches(&passes);
        let collective_order = options.ops_hold_collectives.then(|| CollectiveOrder::of(&passes));
        self.run_together(collective_order.unwrap_or_default());
    }

    /// Recomputes the collectives from the passes of the ranks' plans, without exchanged nodes, for models
    /// whose ops contain collectives. Every rank needs the passes of all ranks: it plans every share itself,
    /// or gathers them.
    ///
    /// # Errors
    /// `Plan` unless there is one list of passes per share.
    pub fn with_passes(mut self, passes: &[Vec<PassKind>]) -> Result<Self, BalanceError> {
        let shares = self.shares.len() as u64;
        check_range("passes of ranks", passes.len() as u64, shares, shares)?;
        self.count_microbatches(passes);
        self.run_together(CollectiveOrder::of(passes));
        Ok(self)
    }

    fn count_microbatches(&mut self, passes: &[Vec<PassKind>]) {
        for (share, own) in self.shares.iter_mut().zip(passes) {
            share.features.microbatches =
                own.iter().filter(|kind| **kind == PassKind::Microbatch).count() as u64;
        }
    }

    /// Sets the dummies and the order of all collectives.
    fn run_together(&mut self, collective_order: CollectiveOrder) {
        for (rank, share) in self.shares.iter_mut().enumerate() {
            share.dummy_microbatches = collective_order.dummies(rank, PassKind::Microbatch);
            share.dummy_forwards = collective_order.dummies(rank, PassKind::Forward);
            share.dummy_backwards = collective_order.dummies(rank, PassKind::Backward);
        }
        self.collective_order = collective_order;
        let exchanges = 0..self.exchanges.len() as u32;
        let forwards = exchanges.clone().map(|exchange| Collective::PrefixForward { exchange });
        let ops = self.collective_order.kinds.iter().map(|op| Collective::Op { op: *op });
        let backwards = exchanges.rev().map(|exchange| Collective::PrefixBackward { exchange });
        let end = [Collective::ParameterGradients];
        self.collectives = forwards.chain(ops).chain(backwards).chain(end).collect();
        let end = self.collectives.len() as u32 - 1;
        for (index, exchange) in (0_u32..).zip(&mut self.exchanges) {
            (exchange.forward_at, exchange.backward_at) = (index, end - 1 - index);
        }
    }
}

/// Returns divided nodes in the order that keeps waits short, then sent nodes, ancestors first.
fn exchanges(plan: &ExchangePlan<'_>) -> Vec<PrefixExchange> {
    let exchange = |common: &SharedNode, transfer| {
        let node = plan.leaves.forest.node(common.node);
        PrefixExchange {
            node: common.node,
            transfer,
            from: common.first,
            to: Span { begin: u64::from(common.first) + 1, end: u64::from(common.last) + 1 },
            kv_bytes: plan.cost_table.kv_bytes(node),
            gradient_bytes: plan.cost_table.gradient_bytes(node),
            forward_at: 0,
            backward_at: 0,
        }
    };
    let divided = plan.divided_in_order();
    let divided = divided.iter().map(|(common, _)| exchange(common, ExchangeMode::Divide));
    let sent = plan.common.iter().filter(|common| common.way == ExchangeChoice::Send);
    divided.chain(sent.map(|common| exchange(common, ExchangeMode::Send))).collect()
}

/// Returns the rank of each leaf from the ends of segments.
fn ranks_of(ends: &[u32]) -> Vec<u32> {
    let mut ranks = Vec::new();
    for (rank, end) in (0..).zip(ends) {
        ranks.resize(*end as usize, rank);
    }
    ranks
}
