//! JSON forms match the recording `tests/testdata/rooms.json`; `UPDATE=1` rewrites it.

use std::fs;
use std::path::Path;

use dormouse_parallel::context::{
    KvExchange, KvExchangeOptions, KvShape, ShardCut, ShardOptions, Shards,
};
use dormouse_parallel::experts::{Accounting, Baseline};
use dormouse_parallel::rollout::{
    Assignment, History, LengthPredictor, Migration, MigrationOptions, Progress, Rollout,
    RolloutReport, RolloutRequest, StepOptions, migrate,
};
use dormouse_schedule::Span;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::layout::{
    LayoutOptions, Packed, Padded, PaddedMicrobatch, Piece, pack_padded,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::experts::router;

#[derive(Default)]
struct Recorded(Map<String, Value>);

impl Recorded {
    /// Records a value under a name after checking that its JSON reads back as an equal value.
    fn keep<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
        &mut self,
        name: &str,
        value: &T,
    ) {
        let json = serde_json::to_string(value).unwrap();
        assert_eq!(&serde_json::from_str::<T>(&json).unwrap(), value);
        self.0.insert(name.to_owned(), serde_json::from_str(&json).unwrap());
    }
}

fn rows(recorded: &mut Recorded) {
    let options = LayoutOptions { multiple: 2, ..LayoutOptions::default() };
    let labels = Span { begin: 1, end: 3 };
    let piece = Piece { sequence: 0, first_position: 0, rows: 3, prefix: None, labels };
    recorded.keep("piece", &piece);
    recorded.keep("packed", &Packed::of(&[piece], &options).unwrap());
    recorded.keep("padded", &Padded::of(&[piece], &options).unwrap());
    let microbatches: Vec<PaddedMicrobatch> = pack_padded(&[2, 3], 8, 2).unwrap();
    recorded.keep("padded_microbatches", &microbatches);
    let cut = ShardCut::Balanced { chunks: 2 };
    let shards = Shards::of(&[piece], &ShardOptions { ranks: 2, cut, multiple: 1 }).unwrap();
    let shape =
        KvShape { layers: 1, row_bytes: 4, gradient_row_bytes: 8, accumulator_row_bytes: None };
    let options = KvExchangeOptions::default();
    recorded.keep("exchange", &KvExchange::of(&shards, &shards, &shape, &options).unwrap());
    recorded.keep("shards", &shards);
}

fn rollouts(recorded: &mut Recorded) {
    let request =
        |prompt| RolloutRequest { prompt, prompt_tokens: 9, responses: 1, begun_tokens: 0 };
    let (requests, predictor) = ([request(1), request(2)], LengthPredictor::default());
    let options = StepOptions { step: 1, workers: 2, groups: Some(2), ..StepOptions::default() };
    let step = Assignment::of(&History::default(), &requests, &predictor, &options).unwrap();
    let rollout = |request| Rollout {
        request,
        response: 0,
        worker: request,
        tokens: 4,
        finished: request == 1,
    };
    let progress = Progress { rollouts: vec![rollout(0), rollout(1)], ..Progress::default() };
    let limits = MigrationOptions { tail_permille: 1000, ..MigrationOptions::default() };
    let moves: Vec<Migration> =
        migrate(&step, &requests, &History::default(), &progress, &limits).unwrap();
    recorded.keep("migrations", &moves);
    recorded.keep("report", &RolloutReport::of(&step, &progress, None, 100).unwrap());
    recorded.keep("progress", &progress);
    recorded.keep("assignment", &step);
    recorded.keep("step_options", &options);
}

#[test]
fn json_matches_the_recording_and_round_trips() {
    let mut recorded = Recorded::default();
    rows(&mut recorded);
    rollouts(&mut recorded);
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[2, 1, 1]).unwrap();
    let (scopes, scope_weights) = (vec![0, 0], vec![0.5]);
    let baseline = Baseline { scopes, scope_weights, ..Baseline::default() };
    recorded.keep("baseline", &baseline);
    recorded.keep("router", &router());
    let accounting = Accounting::of(&forest, &[0, 0], &baseline, &router()).unwrap();
    recorded.keep("accounting", &accounting);

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata/rooms.json");
    let got: String = recorded.0.iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &got).unwrap();
    }
    assert_eq!(got, fs::read_to_string(&path).unwrap(), "{}", path.display());
}
