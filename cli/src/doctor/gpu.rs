//! The driver, the first GPU, its pages and its link.
#![expect(unsafe_code, reason = "queues copies")]

use std::sync::Arc;

use dormouse_device::cuda::{CudaConfig, CudaDevice, Unavailable};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, PinnedMemory};
use dormouse_parallel::draw::bytes;

use super::Check;

const WHAT: &str = "gpu";
/// Bytes of a measured copy.
const COPY_BYTES: usize = 256 << 20;
/// Rates below those of a link of this generation and width get advice: PCIe 3.0 x16.
const LINK_BYTES_PER_S_MIN: f64 = 10e9;

/// Checks the first GPU; none is fine.
pub(super) fn checks() -> Vec<Check> {
    let device = match CudaDevice::new(&CudaConfig::default()) {
        Ok(device) => Arc::new(device),
        Err(Unavailable::NoDriver | Unavailable::NoDevice { .. }) => {
            return vec![Check::ok(WHAT, "none; CPU memory is managed")];
        }
        Err(error) => {
            let advice = "update the driver, or hide the GPU: CUDA_VISIBLE_DEVICES=";
            return vec![Check::broken(WHAT, error.to_string(), advice)];
        }
    };
    let seen = format!(
        "{} of memory, pages of {}, large pages of {}",
        bytes(device.memory_info().capacity_bytes),
        bytes(device.page_bytes() as u64),
        bytes(device.large_page_bytes() as u64)
    );
    vec![Check::ok(WHAT, seen), link(&device)]
}

fn link(device: &Arc<CudaDevice>) -> Check {
    const WHAT: &str = "gpu link";
    let text = |rate: f64| format!("{}/s", bytes(rate as u64));
    match measure(device) {
        Ok(Some([out, back])) => {
            let seen = format!("to the host {}, to the GPU {}", text(out), text(back));
            match out.min(back) < LINK_BYTES_PER_S_MIN {
                true => Check::advice(
                    WHAT,
                    seen,
                    "slow: is the GPU busy, or in a slot with fewer lanes?",
                ),
                false => Check::ok(WHAT, seen),
            }
        }
        Ok(None) => Check::ok(WHAT, "not measured: the device has no clock"),
        Err(error) => Check::broken(
            WHAT,
            error.to_string(),
            "is all memory of the GPU or of the host in use?",
        ),
    }
}

/// Returns bytes per second to the host and to the GPU.
fn measure(device: &Arc<CudaDevice>) -> Result<Option<[f64; 2]>, DeviceError> {
    let host = PinnedMemory::allocate(device, COPY_BYTES)?;
    let range = AddressRange::new(device.address_space().start, COPY_BYTES);
    device.map(range, Fill::Any)?;
    let stream = device.create_stream("doctor")?;
    let (host, gpu) = (host.range().start, range.start);
    let timed = |destination, source| -> Result<Option<f64>, DeviceError> {
        let mut events = Vec::new();
        // The first copy wakes the link up.
        for _ in 0..2 {
            events.push(device.record_timed(&stream)?);
            // SAFETY: both ranges have these bytes, live until the events below have completed, and are apart.
            unsafe { device.copy(destination, source, COPY_BYTES, &stream) }?;
        }
        events.push(device.record_timed(&stream)?);
        let [.., first, last] = events.as_slice() else { return Ok(None) };
        device.synchronize(last)?;
        Ok(device.between(first, last).map(|time| COPY_BYTES as f64 / time.as_secs_f64()))
    };
    let rates = timed(host, gpu)?.zip(timed(gpu, host)?);
    device.unmap(range)?;
    Ok(rates.map(|(out, back)| [out, back]))
}
