//! Scenarios of layouts: `tests/testdata/layout/`.

use std::fmt::Write as _;

use dormouse_schedule::layout::{
    LayoutOptions, PADDING, Packed, Padded, PaddingSide, Piece, Positions, Rows, Varlen,
    pack_padded,
};
use dormouse_schedule::{NodeId, Span};

use crate::{lines, number, scenarios};

#[test]
fn layout_scenarios() {
    scenarios("layout", 6, run);
}

fn run(input: &str) -> String {
    let mut options = LayoutOptions::default();
    let (mut pieces, mut budget) = (Vec::new(), None);
    for (key, words) in lines(input) {
        match key {
            "multiple" => options.multiple = number(&words, 0),
            "budget" => budget = Some(number(&words, 0)),
            "mrope" => options.positions = Positions::MultiAxis,
            "left" => options.padding_side = PaddingSide::Left,
            "piece" => pieces.push(piece(pieces.len() as u32, &words)),
            other => panic!("unknown line {other:?}"),
        }
    }
    match budget {
        Some(budget) => packing(&pieces, budget, options.multiple),
        None => layouts(&pieces, &options),
    }
}

/// `ROWS from POSITION of NODE [unscored | fed]`; `of none` at the start of a sequence.
fn piece(sequence: u32, words: &[&str]) -> Piece {
    let (rows, begin) = (number(words, 0), number(words, 2));
    let prefix = (words[4] != "none").then(|| NodeId(number(words, 4)));
    let labels = match words.get(5) {
        Some(&"unscored") => Span::default(),
        Some(&"fed") => Span { begin: begin + 1, end: begin + rows },
        _ => Span { begin: begin + 1, end: begin + 1 + rows },
    };
    Piece { sequence, first_position: begin, rows, prefix, labels }
}

fn show(text: &mut String, rows: &Rows, width: usize) {
    for (sequences, positions) in rows.sequences.chunks(width).zip(rows.positions.chunks(width)) {
        text.push_str("   ");
        for (sequence, position) in sequences.iter().zip(positions) {
            match *sequence {
                PADDING => write!(text, " --").unwrap(),
                of => write!(text, " {}{position}", char::from(b'a' + of as u8)).unwrap(),
            }
        }
        text.push('\n');
    }
}

fn varlen(text: &mut String, name: &str, one: &Varlen) {
    writeln!(
        text,
        "    {name} queries {:?} most {}, keys {:?} most {}",
        one.cu_seqlens_q, one.max_seqlen_q, one.cu_seqlens_k, one.max_seqlen_k
    )
    .unwrap();
}

fn layouts(pieces: &[Piece], options: &LayoutOptions) -> String {
    let mut text = String::new();
    match Packed::of(pieces, options) {
        Err(error) => writeln!(text, "packed refused: {error}").unwrap(),
        Ok(packed) => {
            writeln!(text, "packed, {} rows of padding", packed.padding_rows).unwrap();
            show(&mut text, &packed.rows, packed.rows.sequences.len());
            varlen(&mut text, "suffix", &packed.suffix);
            varlen(&mut text, "prefix", &packed.prefix);
            let nodes: Vec<String> = packed
                .prefix_nodes
                .iter()
                .map(|node| node.map_or("none".to_owned(), |node| node.0.to_string()))
                .collect();
            writeln!(text, "    prefixes {}, labels {:?}", nodes.join(" "), packed.rows.label_rows)
                .unwrap();
        }
    }
    match Padded::of(pieces, options) {
        Err(error) => writeln!(text, "padded refused: {error}").unwrap(),
        Ok(padded) => {
            writeln!(text, "padded, {} rows wasted", padded.wasted_rows).unwrap();
            show(&mut text, &padded.rows, padded.width as usize);
            writeln!(
                text,
                "    lengths {:?}, prefix keys {:?}, labels {:?}",
                padded.lengths, padded.prefix_keys, padded.rows.label_rows
            )
            .unwrap();
        }
    }
    text
}

fn packing(pieces: &[Piece], budget: u64, multiple: u32) -> String {
    let rows: Vec<u64> = pieces.iter().map(|piece| piece.rows).collect();
    let mut text = String::new();
    for microbatch in pack_padded(&rows, budget, multiple).unwrap() {
        let padded = microbatch.width * microbatch.members.len() as u64;
        writeln!(
            text,
            "microbatch of {:?}, {} wide, {padded} rows",
            microbatch.members, microbatch.width
        )
        .unwrap();
    }
    text
}
