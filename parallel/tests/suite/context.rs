//! Context shards row by row, and a microbatch's collectives replayed moment by moment.

use dormouse_parallel::context::{
    ContextError, Gathered, KvExchange, KvExchangeOptions, KvPrice, KvShape, KvTransfer,
    KvTransferKind, KvWay, Mark, OpEdge, Pass, Reduced, ShardCut, ShardOptions, Shards,
};
use dormouse_schedule::layout::Piece;
use dormouse_schedule::{NodeId, Span, TOKENS_MAX};
use proptest::prelude::*;

pub(crate) fn piece(first_position: u64, rows: u64) -> Piece {
    let prefix = (first_position > 0).then_some(NodeId(0));
    Piece { sequence: 0, first_position, rows, prefix, labels: Span::default() }
}

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    proptest::collection::vec((0u64..50, 1u64..30), 1..8)
        .prop_map(|all| all.into_iter().map(|(begin, rows)| piece(begin, rows)).collect())
}

fn any_cut() -> impl Strategy<Value = ShardCut> {
    prop_oneof![
        Just(ShardCut::Contiguous),
        Just(ShardCut::Zigzag),
        (2u32..7).prop_map(|chunks| ShardCut::Balanced { chunks }),
    ]
}

/// Piece and offset of every row of the packed row.
fn rows(pieces: &[Piece]) -> Vec<(u32, u64)> {
    (0u32..).zip(pieces).flat_map(|(at, piece)| (0..piece.rows).map(move |row| (at, row))).collect()
}

proptest! {
    #[test]
    fn every_row_has_one_rank(
        pieces in pieces(), ranks in 1u32..6, cut in any_cut(), multiple in 1u32..5,
    ) {
        let shards = Shards::of(&pieces, &ShardOptions { ranks, cut, multiple }).unwrap();
        let rows = rows(&pieces);
        let mut seen = vec![0; rows.len()];
        prop_assert_eq!(shards.ranks.len(), ranks as usize);
        prop_assert_eq!(shards.rows as usize, rows.len());
        let mut pairs_of_all = 0;
        for shard in &shards.ranks {
            let (mut local, mut pairs) = (0, 0);
            for run in &shard.runs {
                prop_assert_eq!(run.local.begin, local, "rows are contiguous");
                prop_assert_eq!(run.local.count(), run.rows.count());
                prop_assert_eq!(run.positions.count(), run.rows.count());
                local = run.local.end;
                for (at, row) in (run.rows.begin..run.rows.end).enumerate() {
                    seen[row as usize] += 1;
                    let (number, offset) = rows[row as usize];
                    let piece = pieces[number as usize];
                    prop_assert_eq!(run.piece, number);
                    let position = run.positions.begin + at as u64;
                    prop_assert_eq!(position, piece.first_position + offset);
                    // The prefix's keys, and its own keys up to the row.
                    pairs += piece.first_position + offset + 1;
                    let keys_after = run.rows.end - 1 - row;
                    prop_assert_eq!(run.own_keys - keys_after, offset + 1, "mask aligned at the end");
                }
            }
            prop_assert_eq!(shard.rows, local);
            prop_assert_eq!(shard.rows + shard.padding_rows, shards.rank_rows);
            prop_assert_eq!(shard.pairs, pairs);
            pairs_of_all += pairs;
        }
        prop_assert!(seen.iter().all(|seen| *seen == 1), "{:?}", seen);
        let most = shards.ranks.iter().map(|shard| shard.pairs).max().unwrap();
        let mean = pairs_of_all as f64 / f64::from(ranks);
        prop_assert!((shards.imbalance - most as f64 / mean).abs() < 1e-12);
        prop_assert!(shards.rank_rows.is_multiple_of(multiple.into()));
        let chunks = match cut { ShardCut::Contiguous => 1, ShardCut::Balanced { chunks } => chunks, _ => 2 };
        let spare = u64::from(ranks * chunks) * u64::from(multiple);
        prop_assert!(shards.rank_rows * u64::from(ranks) < shards.rows + spare, "padding is minimal");
    }

    /// With two chunks per rank, no other pairing has a smaller maximum load.
    #[test]
    fn two_balanced_chunks_are_paired_optimally(pieces in pieces(), ranks in 1u32..5) {
        let shard = |ranks, cut| Shards::of(&pieces, &ShardOptions { ranks, cut, multiple: 1 });
        let dealt = shard(ranks, ShardCut::Balanced { chunks: 2 }).unwrap();
        let most = dealt.ranks.iter().map(|shard| shard.pairs).max().unwrap();
        // With one chunk per rank, each rank has one.
        let alone = shard(2 * ranks, ShardCut::Contiguous).unwrap();
        let mut chunks: Vec<u64> = alone.ranks.iter().map(|shard| shard.pairs).collect();
        prop_assert_eq!(most, best(&mut chunks));
    }

    /// With more chunks, loads differ by at most two chunks.
    #[test]
    fn dealt_loads_differ_by_less_than_chunks(
        pieces in pieces(), ranks in 1u32..5, chunks in 2u32..7,
    ) {
        let shard = |ranks, cut| Shards::of(&pieces, &ShardOptions { ranks, cut, multiple: 1 });
        let spread = |shards: &Shards| {
            let pairs = || shards.ranks.iter().map(|shard| shard.pairs);
            pairs().max().unwrap() - pairs().min().unwrap()
        };
        let dealt = shard(ranks, ShardCut::Balanced { chunks }).unwrap();
        let alone = shard(chunks * ranks, ShardCut::Contiguous).unwrap();
        prop_assert!(spread(&dealt) <= spread(&alone));
    }

    #[test]
    fn a_microbatch_gathers_before_it_attends_and_reduces_after(
        layers in 1u32..6, ranks in 1u32..5, again in any::<bool>(), once in any::<bool>(),
        prefix in 0u64..60, microbatch in pieces(), is_whole in any::<bool>(), wide in any::<bool>(),
        room_bytes in proptest::option::of(0u64..20_000),
    ) {
        let options = ShardOptions { ranks, cut: ShardCut::Zigzag, multiple: 1 };
        let prefix = match prefix {
            0..20 => Shards::none(ranks).unwrap(),
            rows => Shards::of(&[piece(0, rows)], &options).unwrap(),
        };
        let microbatch = if is_whole && prefix.rows > 0 {
            Shards::none(ranks).unwrap()
        } else {
            Shards::of(&microbatch, &options).unwrap()
        };
        let accumulator_row_bytes = wide.then_some(40);
        let shape = KvShape { layers, row_bytes: 10, gradient_row_bytes: 20, accumulator_row_bytes };
        let options = KvExchangeOptions {
            gathered: if again { Gathered::Again } else { Gathered::Kept },
            reduced: if once { Reduced::BeforeC } else { Reduced::EachMicrobatch },
            room_bytes,
            way: None,
        };
        let of = |way| {
            let options = KvExchangeOptions { way, ..options };
            KvExchange::of(&prefix, &microbatch, &shape, &options).unwrap()
        };
        let exchange = of(None);
        check_flow(&prefix, &exchange.prefix.kv_bytes_from, &exchange.prefix.gradient_bytes_to);
        check_flow(&microbatch, &exchange.own.kv_bytes_from, &exchange.own.gradient_bytes_to);
        if ranks == 1 {
            prop_assert!(exchange.transfers.is_empty() && exchange.before_c.is_empty());
            prop_assert_eq!(exchange.microbatch_bytes + exchange.gathered_peak_bytes, 0);
            prop_assert!(exchange.prices.is_empty() && exchange.way == KvWay::AllGather);
            return Ok(());
        }
        let gathered = of(Some(KvWay::AllGather));
        replay(&gathered, layers, &options);
        let received = |one: &KvTransfer| {
            let (rows, bytes) = match one.kind {
                KvTransferKind::GatherPrefix => (prefix.rank_rows, 10),
                KvTransferKind::GatherOwn => (microbatch.rank_rows, 10),
                KvTransferKind::ReducePrefix => (prefix.rank_rows, 20),
                KvTransferKind::ReduceOwn => (microbatch.rank_rows, 20),
                other => panic!("{other:?} of an all-gather"),
            };
            rows * bytes * u64::from(ranks - 1)
        };
        for one in gathered.transfers.iter().chain(&gathered.before_c) {
            prop_assert_eq!(one.received_bytes, received(one));
        }
        prop_assert_eq!(gathered.microbatch_bytes, gathered.transfers.iter().map(received).sum::<u64>());
        let accumulator = if wide { 40 } else { 20 };
        if once {
            let rows = prefix.rank_rows * accumulator * u64::from(layers) + microbatch.rank_rows * 20;
            prop_assert_eq!(gathered.gradient_peak_bytes, rows * u64::from(ranks));
        }
        let ring = of(Some(KvWay::Ring));
        check_ring(&ring, layers, &prefix, &microbatch, accumulator);
        check_way(&exchange, &gathered, &ring, room_bytes);
    }
}

/// Plays a ring hop by hop.
fn check_ring(
    ring: &KvExchange,
    layers: u32,
    prefix: &Shards,
    microbatch: &Shards,
    accumulator: u64,
) {
    let ranks = prefix.ranks.len();
    let moments = moments(layers);
    let when = |mark: Mark| moments.iter().position(|at| *at == mark).unwrap();
    let issues: Vec<usize> = ring.transfers.iter().map(|one| when(one.issue)).collect();
    assert!(issues.is_sorted() && ring.before_c.is_empty());
    assert!(ring.transfers.iter().all(|one| when(one.issue) < when(one.due)));
    let (kv, accumulators) = received_in_ring(ranks);
    let mut rows = [(Pass::Forward, 0), (Pass::Backward, 0)];
    for (at, kind) in [
        (0, KvTransferKind::RingPrefix),
        (1, KvTransferKind::RingOwn),
        (0, KvTransferKind::ReturnPrefix),
        (1, KvTransferKind::ReturnOwn),
    ] {
        let of_rank = [prefix.rank_rows, microbatch.rank_rows][at];
        let returns = matches!(kind, KvTransferKind::ReturnPrefix | KvTransferKind::ReturnOwn);
        for (pass, total) in &mut rows {
            let found =
                ring.transfers.iter().filter(|one| one.kind == kind && one.issue.pass == *pass);
            let found: Vec<(u32, u64)> = found.map(|one| (one.layer, one.received_bytes)).collect();
            let is_sent = of_rank > 0 && !(returns && *pass == Pass::Forward);
            let bytes = of_rank * if returns { accumulators * accumulator } else { kv / 2 * 10 };
            let mut wanted: Vec<(u32, u64)> = (0..layers).map(|layer| (layer, bytes)).collect();
            if *pass == Pass::Backward {
                wanted.reverse();
            }
            assert_eq!(found, if is_sent { wanted } else { Vec::new() }, "{kind:?} {pass:?}");
            *total += found.iter().map(|(_, bytes)| bytes).sum::<u64>();
        }
    }
    assert_eq!(ring.microbatch_bytes, rows[0].1 + rows[1].1);
    // The block that is read and the one that arrives, of two ranks one: the other is the rank's own.
    let block_rows = prefix.rank_rows + microbatch.rank_rows;
    assert_eq!(ring.gathered_peak_bytes, block_rows * 10 * (ranks as u64 - 1).min(2));
    assert_eq!(ring.gradient_peak_bytes, block_rows * accumulator * 2);
}

/// Blocks of K and V, and accumulators of their gradients, that a rank of a ring receives in both passes of
/// a layer, hop by hop.
fn received_in_ring(ranks: usize) -> (u64, u64) {
    let mut received = (0, 0);
    for is_backward in [false, true] {
        // The ranks that each block has visited, and where it is.
        let mut visited: Vec<Vec<usize>> = (0..ranks).map(|owner| vec![owner]).collect();
        while visited.iter().any(|ranks_of| ranks_of.len() < ranks) {
            for ranks_of in &mut visited {
                let next = (ranks_of[ranks_of.len() - 1] + 1) % ranks;
                ranks_of.push(next);
                if next == 0 {
                    received.0 += 1;
                    received.1 += u64::from(is_backward);
                }
            }
        }
        // An accumulator that has visited all returns to its owner.
        if is_backward {
            received.1 += visited.iter().filter(|ranks_of| ranks_of[0] == 0).count() as u64;
        }
    }
    received
}

fn check_way(
    exchange: &KvExchange,
    gathered: &KvExchange,
    ring: &KvExchange,
    room_bytes: Option<u64>,
) {
    let prices = [gathered, ring].map(|each| KvPrice {
        way: each.way,
        received_bytes: each.microbatch_bytes,
        held_bytes: each.gathered_peak_bytes + each.gradient_peak_bytes,
    });
    let [of_gather, of_ring] = prices;
    assert!(of_ring.received_bytes > of_gather.received_bytes, "accumulators take a hop more");
    let fits = room_bytes.is_none_or(|room| of_gather.held_bytes <= room);
    let is_ring = !fits && of_ring.held_bytes < of_gather.held_bytes;
    assert_eq!(exchange, if is_ring { ring } else { gathered });
    assert!([exchange, gathered, ring].iter().all(|each| each.prices == prices));
}

/// The smallest maximum pair over all perfect matchings.
fn best(chunks: &mut Vec<u64>) -> u64 {
    let Some(first) = chunks.pop() else { return 0 };
    let mut least = u64::MAX;
    for at in 0..chunks.len() {
        let other = chunks.remove(at);
        least = least.min(best(chunks).max(first + other));
        chunks.insert(at, other);
    }
    chunks.push(first);
    least
}

fn check_flow(shards: &Shards, kv: &[u64], gradients: &[u64]) {
    for (rank, shard) in shards.ranks.iter().enumerate() {
        assert_eq!((kv[rank], gradients[rank]), (shard.rows * 10, shard.rows * 20));
    }
}

/// Every moment of a microbatch, in order.
fn moments(layers: u32) -> Vec<Mark> {
    use OpEdge::{Attention, AttentionDone, Begin, End, KvMade, Projections};
    let forward = [Begin, KvMade, Attention, AttentionDone, End];
    let backward = [Begin, Attention, AttentionDone, Projections, End];
    let all = |pass, edges: [OpEdge; 5], layer| edges.map(|edge| Mark { pass, layer, edge });
    (0..layers)
        .flat_map(|layer| all(Pass::Forward, forward, layer))
        .chain((0..layers).rev().flat_map(|layer| all(Pass::Backward, backward, layer)))
        .collect()
}

/// Visits the moments in order and tracks the gathered layers.
fn replay(exchange: &KvExchange, layers: u32, options: &KvExchangeOptions) {
    let moments = moments(layers);
    let when = |mark: Mark| moments.iter().position(|at| *at == mark).unwrap();
    let issues: Vec<usize> = exchange.transfers.iter().map(|one| when(one.issue)).collect();
    assert!(issues.is_sorted(), "every rank issues collectives in one order");
    // A prefix without rows is not exchanged.
    let read = exchange.prefix.kv_bytes_sent > 0;
    let has_own = exchange.own.kv_bytes_sent > 0;
    let mut held = vec![[false; 2]; layers as usize]; // the prefix's, its own
    let (mut most, mut reduced) = (0, vec![[0; 2]; layers as usize]);
    let bytes = [exchange.prefix.kv_bytes_sent, exchange.own.kv_bytes_sent]
        .map(|bytes| bytes * exchange.own.kv_bytes_from.len() as u64);
    for (now, at) in moments.iter().enumerate() {
        for one in exchange.transfers.iter().filter(|one| one.issue == *at) {
            assert!(when(one.due) > now, "{one:?} is due before it is issued");
            let layer = one.layer as usize;
            let side = usize::from(matches!(
                one.kind,
                KvTransferKind::GatherOwn | KvTransferKind::ReduceOwn
            ));
            match one.kind {
                KvTransferKind::GatherPrefix | KvTransferKind::GatherOwn => {
                    assert!(!held[layer][side], "gathered twice");
                    assert_eq!((one.due.layer, one.due.edge), (one.layer, OpEdge::Attention));
                    held[layer][side] = true;
                    let ahead = at.layer.abs_diff(one.layer);
                    let made_here = side == 1 && at.pass == Pass::Forward;
                    assert!(if made_here { ahead == 0 } else { ahead == 1 || now == 0 });
                }
                KvTransferKind::ReducePrefix | KvTransferKind::ReduceOwn => {
                    let made = Mark { edge: OpEdge::AttentionDone, layer: one.layer, ..*at };
                    assert_eq!((*at, at.pass), (made, Pass::Backward), "gradients exist");
                    reduced[layer][side] += 1;
                }
                other => panic!("{other:?} of an all-gather"),
            }
        }
        let alive = held.iter().flat_map(|held| held.iter().zip(bytes));
        most = most.max(alive.map(|(held, bytes)| u64::from(*held) * bytes).sum());
        let layer = at.layer as usize;
        match (at.pass, at.edge) {
            (_, OpEdge::Attention) => {
                assert_eq!(held[layer], [read, has_own], "{at:?} needs its keys")
            }
            (Pass::Forward, OpEdge::End) => {
                let kept = options.gathered == Gathered::Kept || at.layer + 1 == layers;
                held[layer] = [kept && read, kept && has_own];
            }
            (Pass::Backward, OpEdge::AttentionDone) => held[layer] = [false; 2],
            _ => {}
        }
    }
    assert_eq!(exchange.gathered_peak_bytes, most);
    let each_microbatch = usize::from(options.reduced == Reduced::EachMicrobatch);
    let wanted = [if read { each_microbatch } else { 0 }, usize::from(has_own)];
    assert!(reduced.iter().all(|seen| *seen == wanted), "{reduced:?}");
    let after: Vec<u32> = exchange.before_c.iter().map(|one| one.layer).collect();
    let wanted: Vec<u32> = (0..layers).rev().collect();
    assert_eq!(after, if each_microbatch == 1 || !read { Vec::new() } else { wanted });
}

#[test]
fn zigzag_is_even_for_a_causal_prefix_and_contiguous_is_not() {
    let shard =
        |cut| Shards::of(&[piece(0, 4096)], &ShardOptions { ranks: 4, cut, multiple: 1 }).unwrap();
    assert!((shard(ShardCut::Zigzag).imbalance - 1.0).abs() < 1e-12);
    assert!((shard(ShardCut::Balanced { chunks: 2 }).imbalance - 1.0).abs() < 1e-12);
    assert!(shard(ShardCut::Contiguous).imbalance > 1.7, "the last quarter has 7/16 of the pairs");
    let ranks = shard(ShardCut::Zigzag).ranks;
    let spans = |rank: usize| ranks[rank].runs.iter().map(|run| run.rows).collect::<Vec<_>>();
    let span = |begin, end| Span { begin, end };
    assert_eq!(spans(0), [span(0, 512), span(3584, 4096)]);
    assert_eq!(spans(3), [span(1536, 2560)], "neighbours are one run");
}

#[test]
fn balanced_shards_of_many_suffixes_are_more_even_than_zigzag() {
    // Lengths decrease: later chunks of the packed row have fewer keys of their own.
    let microbatch: Vec<Piece> =
        [900, 500, 300, 200, 100, 24, 12, 12].map(|rows| piece(100, rows)).into();
    let imbalance = |cut| {
        Shards::of(&microbatch, &ShardOptions { ranks: 4, cut, multiple: 1 }).unwrap().imbalance
    };
    let two = imbalance(ShardCut::Balanced { chunks: 2 });
    assert!(imbalance(ShardCut::Balanced { chunks: 8 }) < 1.01);
    assert!(two < 1.2 && imbalance(ShardCut::Zigzag) > 1.3);
}

#[test]
fn refuses_values_out_of_range_and_different_groups() {
    let ok = ShardOptions { ranks: 2, cut: ShardCut::Zigzag, multiple: 1 };
    let refused = |pieces: &[Piece], options| Shards::of(pieces, &options).unwrap_err().to_string();
    assert!(refused(&[], ok).starts_with("pieces is 0"));
    assert!(
        refused(&[piece(0, 1)], ShardOptions { ranks: 0, ..ok }).starts_with("context ranks is 0")
    );
    assert!(
        refused(&[piece(0, 1)], ShardOptions { multiple: 0, ..ok }).starts_with("multiple is 0")
    );
    let one = ShardOptions { cut: ShardCut::Balanced { chunks: 1 }, ..ok };
    assert!(refused(&[piece(0, 1)], one).starts_with("chunks is 1; accepted: 2 to 256"));
    assert!(refused(&[piece(0, TOKENS_MAX), piece(0, 1)], ok).starts_with("rows is 268435457"));
    let two = Shards::of(&[piece(0, TOKENS_MAX)], &ok).unwrap();
    assert_eq!(two.ranks[0].pairs + two.ranks[1].pairs, TOKENS_MAX * (TOKENS_MAX + 1) / 2);
    assert!(Shards::none(0).unwrap_err().to_string().starts_with("context ranks is 0"));
    let three = Shards::of(&[piece(0, 9)], &ShardOptions { ranks: 3, ..ok }).unwrap();
    let shape =
        KvShape { layers: 1, row_bytes: 1, gradient_row_bytes: 1, accumulator_row_bytes: None };
    let options = KvExchangeOptions::default();
    assert_eq!(
        KvExchange::of(&two, &three, &shape, &options),
        Err(ContextError::Groups { prefix: 2, microbatch: 3 })
    );
    for shape in [
        KvShape { layers: 0, ..shape },
        KvShape { row_bytes: 0, ..shape },
        KvShape { gradient_row_bytes: u64::MAX, ..shape },
        KvShape { accumulator_row_bytes: Some(0), ..shape },
    ] {
        assert!(matches!(
            KvExchange::of(&two, &two, &shape, &options),
            Err(ContextError::Count(_))
        ));
    }
    let largest =
        KvShape { layers: 4096, row_bytes: 1 << 30, gradient_row_bytes: 1 << 30, ..shape };
    let exchange = KvExchange::of(&two, &two, &largest, &options).unwrap();
    assert_eq!(exchange.gathered_peak_bytes, u64::MAX, "bytes saturate at 64 bits");
}
