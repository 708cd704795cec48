//! `gpu-check PART [OPTION=VALUE ...]`: one part of what a GPU has to show, for a machine that has
//! one. `scripts/gpu-suite` runs the parts; each prints one JSON object as its last line and ends
//! with 0 where everything held, 1 where something did not, 2 where it could not run.
//!
//! Parts: `conformance`, `kernels`, `copies`, `mapping`, `sleep`, `streams`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a check fails by panicking, like a test"
)]

mod beside;
mod calls;
mod copies;
mod kernels;
mod mapping;
mod plain;
mod sleep;
mod streams;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use dormouse_device::conformance;
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use serde_json::{Value, json};

/// Options of the command line, by name.
struct Options(Vec<(String, String)>);

impl Options {
    fn number(&self, name: &str, otherwise: usize) -> usize {
        let found = self.0.iter().rev().find(|(key, _)| key == name);
        found.map_or(otherwise, |(_, text)| {
            text.parse().unwrap_or_else(|_| panic!("{name}={text}: a number is accepted"))
        })
    }
}

/// Every case of the suite, on 64 pages of the driver's own granularity.
fn conform(_: &Options) -> Value {
    let page_bytes = {
        use dormouse_device::Device;
        CudaDevice::new(&CudaConfig::default()).unwrap().page_bytes()
    };
    let config = CudaConfig {
        capacity_bytes: 64 * page_bytes as u64,
        reserve_bytes: 256 * page_bytes,
        ..CudaConfig::default()
    };
    conformance::run(&|| CudaDevice::new(&config).unwrap());
    json!({ "page_bytes": page_bytes })
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let part = arguments.next().unwrap_or_default();
    let options = arguments
        .filter_map(|it| it.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())));
    let options = Options(options.collect());
    let run: fn(&Options) -> Value = match part.as_str() {
        "conformance" => conform,
        "kernels" => kernels::check,
        "copies" => copies::measure,
        "mapping" => mapping::measure,
        "sleep" => sleep::check,
        "streams" => streams::check,
        _ => {
            eprintln!(
                "gpu-check conformance|kernels|copies|mapping|sleep|streams [option=value ...]"
            );
            return ExitCode::from(2);
        }
    };
    if let Err(unavailable) = CudaDevice::new(&CudaConfig::default()) {
        println!("{}", json!({ "part": part, "cannot_run": unavailable.to_string() }));
        return ExitCode::from(2);
    }
    match catch_unwind(AssertUnwindSafe(|| run(&options))) {
        Ok(found) => {
            println!("{}", json!({ "part": part, "held": true, "found": found }));
            ExitCode::SUCCESS
        }
        Err(_) => {
            println!("{}", json!({ "part": part, "held": false }));
            ExitCode::FAILURE
        }
    }
}

/// The middle of an odd number of figures.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}
