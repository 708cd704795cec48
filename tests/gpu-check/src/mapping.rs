//! What putting pages behind addresses costs, by the size of a page: the driver's calls one by one, idle
//! and beside kernels, with what launches of another thread wait; and our device's own map and unmap.

use std::thread;
use std::time::{Duration, Instant};

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device, Fill};
use serde_json::{Value, json};

use crate::beside::{Launches, Spin, beside, probed};
use crate::calls::{Call, Calls, Samples};
use crate::plain::Plain;
use crate::{Options, median};

const MIB: usize = 1 << 20;
const ROUNDS: usize = 7;
/// Sizes measured: the driver's granularity and its next doublings.
const SIZES: usize = 6;
/// Handles of a batch: a gibibyte of the largest.
const BATCH: usize = 16;
/// Batches of one size: each second one in runs.
const BATCHES_MAX: usize = 64;
/// After which no batch of this size begins: calls may wait for kernels.
const SERIES: Duration = Duration::from_millis(1500);
/// How long launches are looked at without mapping.
const ALONE: Duration = Duration::from_millis(300);

/// `kernel_ms`: how long each kernel beside lasts (10). `bytes_mib`: how much our device maps at a time
/// (1024).
pub(crate) fn measure(options: &Options) -> Value {
    let kernel_ns = options.number("kernel_ms", 10) as u64 * 1_000_000;
    let smallest = CudaDevice::new(&CudaConfig::default()).unwrap().page_bytes();
    let plain = Plain::open();
    let (mut series, mut alone) = (vec![], vec![]);
    let spin = Spin::load(&plain);
    match &spin {
        Ok(spin) => {
            let mut in_state = |state: &str| {
                let ((), launches) = probed(*spin, || thread::sleep(ALONE));
                alone.push(json!({ "state": state, "launch": launched(&launches) }));
                for shift in 0..SIZES {
                    series.push(one_size(&plain, Some(*spin), state, smallest << shift));
                }
            };
            in_state("idle");
            beside(*spin, kernel_ns, || in_state("beside kernels"));
        }
        Err(_) => {
            series.extend((0..SIZES).map(|shift| one_size(&plain, None, "idle", smallest << shift)))
        }
    }
    json!({
        "kernel_ms": kernel_ns as f64 / 1e6,
        "kernel_refused": spin.err(),
        "series": series,
        "alone": alone,
        "device": of_device(options.number("bytes_mib", 1024) * MIB, smallest),
    })
}

/// The driver's calls on handles of one size.
fn one_size(plain: &Plain, spin: Option<Spin>, state: &str, page_bytes: usize) -> Value {
    let calls = Calls::new(plain, BATCH * page_bytes);
    // The first use of addresses makes page tables.
    calls.batch(page_bytes, false, &mut Samples::default());
    let work = || {
        let (mut samples, start) = (Samples::default(), Instant::now());
        for batch in 0..BATCHES_MAX {
            if batch < 2 || start.elapsed() < SERIES {
                calls.batch(page_bytes, batch % 2 == 1, &mut samples);
            }
        }
        samples
    };
    let (samples, launches) = match spin {
        Some(spin) => probed(spin, work),
        None => (work(), Launches::default()),
    };
    let by_call = Call::ALL
        .iter()
        .map(|(call, name)| ((*name).to_owned(), figures(&samples[*call as usize])));
    json!({
        "page_bytes": page_bytes,
        "state": state,
        "run_handles": BATCH,
        "calls": by_call.collect::<serde_json::Map<_, _>>(),
        "launch": launched(&launches),
    })
}

fn launched(launches: &Launches) -> Value {
    json!({ "call": figures(&launches.call), "done": figures(&launches.done) })
}

/// Middle and longest, in microseconds.
fn figures(samples: &[f64]) -> Value {
    let longest = samples.iter().copied().fold(0.0, f64::max);
    let middle = if samples.is_empty() { None } else { Some(median(samples.to_vec())) };
    json!({ "count": samples.len(), "median_us": middle, "longest_us": longest })
}

/// Microseconds per GiB of our device's map of fresh pages, of parked ones, and of its unmap.
fn of_device(bytes: usize, smallest: usize) -> Vec<Value> {
    let gib = bytes as f64 / (1 << 30) as f64;
    let sizes = (0..SIZES).map(|shift| smallest << shift);
    let rows = sizes.filter(|page| bytes.is_multiple_of(*page)).map(|page_bytes| {
        let config = CudaConfig { page_bytes, ..CudaConfig::default() };
        let device = CudaDevice::new(&config).unwrap();
        let range = AddressRange::new(device.address_space().start, bytes);
        let (mut fresh, mut parked, mut unmapped) = (vec![], vec![], vec![]);
        for _ in 0..ROUNDS {
            device.release_parked();
            let timed = |figures: &mut Vec<f64>, work: &dyn Fn()| {
                let start = Instant::now();
                work();
                figures.push(start.elapsed().as_secs_f64() * 1e6 / gib);
            };
            timed(&mut fresh, &|| device.map(range, Fill::Any).unwrap());
            timed(&mut unmapped, &|| device.unmap(range).unwrap());
            timed(&mut parked, &|| device.map(range, Fill::Any).unwrap());
            device.unmap(range).unwrap();
        }
        json!({
            "page_bytes": page_bytes,
            "map_fresh_us_per_gib": median(fresh),
            "map_parked_us_per_gib": median(parked),
            "unmap_us_per_gib": median(unmapped),
        })
    });
    rows.collect()
}
