//! Readable shards and collectives: `tests/testdata/context/`.

use std::fmt::Write as _;

use dormouse_parallel::context::{
    Gathered, KvExchange, KvExchangeOptions, KvPrice, KvShape, KvTransfer, Mark, Reduced, ShardCut,
    ShardOptions, Shards,
};
use dormouse_schedule::layout::Piece;

use crate::context::piece;
use crate::{lines, number, scenarios};

#[test]
fn context_scenarios() {
    scenarios("context", 8, run);
}

fn run(input: &str) -> String {
    let mut options = ShardOptions { ranks: 1, cut: ShardCut::Zigzag, multiple: 1 };
    let (mut microbatch_cut, mut layers) = (ShardCut::Balanced { chunks: 2 }, 0);
    let mut exchange = KvExchangeOptions::default();
    let (mut prefix, mut microbatch) = (Vec::new(), Vec::new());
    let (mut accumulator_row_bytes, mut are_whole) = (None, false);
    for (key, words) in lines(input) {
        match key {
            "ranks" => options.ranks = number(&words, 0),
            "multiple" => options.multiple = number(&words, 0),
            "cut" => options.cut = cut(&words),
            "microbatch_cut" => microbatch_cut = cut(&words),
            "prefix" => prefix.push(piece(0, number(&words, 0))),
            "suffix" => microbatch.push(piece(prefix[0].rows, number(&words, 0))),
            "layers" => layers = number(&words, 0),
            "gather_again" => exchange.gathered = Gathered::Again,
            "reduce_once" => exchange.reduced = Reduced::BeforeC,
            "room_bytes" => exchange.room_bytes = Some(number(&words, 0)),
            "accumulator_row_bytes" => accumulator_row_bytes = Some(number(&words, 0)),
            "whole_sequences" => are_whole = true,
            other => panic!("unknown line {other:?}"),
        }
    }
    let mut text = String::new();
    let prefix = show(&mut text, "prefix", &prefix, &options);
    let microbatch = show(
        &mut text,
        "microbatch",
        &microbatch,
        &ShardOptions { cut: microbatch_cut, ..options },
    );
    let none = || Shards::none(options.ranks).unwrap();
    let microbatch = if are_whole { Some(none()) } else { microbatch };
    if let (Some(prefix), Some(microbatch), 1..) = (prefix, microbatch, layers) {
        let shape = KvShape { layers, row_bytes: 8, gradient_row_bytes: 16, accumulator_row_bytes };
        transfers(&mut text, &KvExchange::of(&prefix, &microbatch, &shape, &exchange).unwrap());
    }
    text
}

fn cut(words: &[&str]) -> ShardCut {
    match words[0] {
        "contiguous" => ShardCut::Contiguous,
        "zigzag" => ShardCut::Zigzag,
        "balanced" => ShardCut::Balanced { chunks: number(words, 1) },
        other => panic!("unknown cut {other:?}"),
    }
}

fn show(text: &mut String, name: &str, pieces: &[Piece], options: &ShardOptions) -> Option<Shards> {
    if pieces.is_empty() {
        return None;
    }
    let shards = match Shards::of(pieces, options) {
        Ok(shards) => shards,
        Err(error) => {
            writeln!(text, "{name} refused: {error}").unwrap();
            return None;
        }
    };
    writeln!(
        text,
        "{name}, {} rows, {} on each rank, imbalance {:.3}",
        shards.rows, shards.rank_rows, shards.imbalance
    )
    .unwrap();
    for (rank, shard) in shards.ranks.iter().enumerate() {
        write!(text, "    rank {rank}, {} pairs:", shard.pairs).unwrap();
        for run in &shard.runs {
            let (begin, end) = (run.positions.begin, run.positions.end);
            write!(text, " {}:{begin}..{end}", run.piece).unwrap();
        }
        writeln!(text, ", {} padding", shard.padding_rows).unwrap();
    }
    Some(shards)
}

fn mark(mark: Mark) -> String {
    format!("{:?} {} {:?}", mark.pass, mark.layer, mark.edge).to_lowercase()
}

fn transfers(text: &mut String, exchange: &KvExchange) {
    writeln!(
        text,
        "K and V of a layer from {:?}, gradients to {:?}",
        exchange.prefix.kv_bytes_from, exchange.prefix.gradient_bytes_to
    )
    .unwrap();
    let mut show = |one: &KvTransfer, of: &str| {
        let (issue, due) = (mark(one.issue), mark(one.due));
        let kind = format!("{:?}", one.kind);
        writeln!(text, "    {kind:<12} {} at {issue}, due {due}{of}", one.layer).unwrap();
    };
    exchange.transfers.iter().for_each(|one| show(one, ""));
    exchange.before_c.iter().for_each(|one| show(one, " of the prefix"));
    writeln!(
        text,
        "received {}, gathered at most {}, gradients at most {}",
        exchange.microbatch_bytes, exchange.gathered_peak_bytes, exchange.gradient_peak_bytes
    )
    .unwrap();
    for price in &exchange.prices {
        let KvPrice { way, received_bytes, held_bytes } = price;
        writeln!(text, "{way:?}: received {received_bytes}, held at most {held_bytes}").unwrap();
    }
    writeln!(text, "chosen: {:?}", exchange.way).unwrap();
}
