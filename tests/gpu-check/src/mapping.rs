//! What putting pages behind addresses costs, by the size of a page.

use std::time::Instant;

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device, Fill};
use serde_json::{Value, json};

use crate::{Options, median};

const MIB: usize = 1 << 20;
const ROUNDS: usize = 7;

/// `bytes_mib`: how much is mapped at a time (1024). Microseconds per GiB: of fresh pages, of
/// parked ones, and of taking them away.
pub(crate) fn measure(options: &Options) -> Value {
    let bytes = options.number("bytes_mib", 1024) * MIB;
    let gib = bytes as f64 / (1 << 30) as f64;
    let smallest = CudaDevice::new(&CudaConfig::default()).unwrap().page_bytes();
    let sizes = (0..6).map(|shift| smallest << shift).filter(|page| bytes.is_multiple_of(*page));
    let rows = sizes.map(|page_bytes| {
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
    json!({ "mapped_bytes": bytes, "rows": rows.collect::<Vec<_>>() })
}
