//! Settings from what a step has measured.

use super::chosen::Chosen;
use crate::{WindowedWake, copy_ns, units};

/// Layers woken ahead before a step was measured: the two that a backward needs, and one to spare.
pub const WINDOW_LAYERS_START: u64 = 3;
/// The most layers woken ahead.
pub const WINDOW_LAYERS_MAX: u64 = 64;
/// Beside the layers that a step of equal layers needs: real ones are not equal.
const SPARE_LAYERS: u32 = 1;
/// A larger window must shorten the backward by more than this part of it.
const GAIN_DIVISOR: u64 = 100;
/// This part more of the memory that a backward was seen to need is kept free: it was seen at marks only.
const UNSEEN_DIVISOR: u64 = 16;

/// Bytes that fall asleep at a time before a link was measured, and the most.
pub const INFLIGHT_BYTES_START: u64 = 256 << 20;
/// The most bytes that fall asleep at a time.
pub const INFLIGHT_BYTES_MAX: u64 = 4 << 30;
/// Fewer would not fill one request.
const INFLIGHT_BYTES_MIN: u64 = 16 << 20;
/// The time in which the end of a copy starts the next one, through events and threads.
const HANDOVER_NS: u64 = 5_000_000;
/// Bytes that fall asleep may be in memory twice: at most this part of what is available.
const AVAILABLE_DIVISOR: u64 = 8;

/// The figures of a step whose layers have slept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Layers that have slept and whose backward has run.
    pub layers: u32,
    /// Their bytes, and those of the largest.
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest_bytes: u64,
    /// The rate at which they wake; 0 if not known.
    pub bytes_per_s: u64,
    /// The time of their backwards.
    pub compute_ns: u64,
    /// From the first wake to the first backward.
    pub lead_ns: u64,
    /// The most device memory in use in the step, in bytes.
    pub peak_bytes: u64,
    /// The most in use in the backward beside the layers.
    pub beside_bytes: u64,
}

/// Returns the layers to wake ahead: the fewest with which the backward waits as little as with any number, and one to
/// spare, as far as the backward then needs no more memory than the step has used. `None` if the step tells nothing.
///
/// While the first wakes have a lead, a link that loads a layer in β loads as many layers as fit in it: a window of
/// fewer than (lead + backward of a layer) / β leaves it idle.
#[must_use]
pub fn window_layers(step: &Step) -> Option<Chosen> {
    let layers = u64::from(step.layers);
    if layers == 0 || step.bytes == 0 || step.largest_bytes == 0 {
        return None;
    }
    let load_ns = copy_ns((step.bytes / layers).into(), step.bytes_per_s)?;
    let compute_ns = step.compute_ns / layers;
    let wake = |window: u32| WindowedWake {
        layers: step.layers,
        window,
        load_s: load_ns as f64 / 1e9,
        compute_s: compute_ns as f64 / 1e9,
        lead_s: step.lead_ns as f64 / 1e9,
    };
    let all = u32::try_from(WINDOW_LAYERS_MAX).unwrap_or(u32::MAX).min(step.layers);
    let enough_s = wake(all).stall_s() + (step.compute_ns / GAIN_DIVISOR) as f64 / 1e9;
    let least = (2..=all).find(|&window| wake(window).stall_s() <= enough_s).unwrap_or(all);
    let wanted = u64::from(least + SPARE_LAYERS);
    let beside_bytes = step.beside_bytes.saturating_add(step.beside_bytes / UNSEEN_DIVISOR);
    let room = step.peak_bytes.saturating_sub(beside_bytes) / step.largest_bytes;
    let times = format!(
        "a layer loads in {}, its backward takes {}, {} before the first",
        units::time(load_ns),
        units::time(compute_ns),
        units::time(step.lead_ns)
    );
    let value = wanted.min(room).clamp(WINDOW_LAYERS_START, WINDOW_LAYERS_MAX);
    Some(if value < wanted {
        let peak = units::bytes(step.peak_bytes);
        Chosen::new(
            value,
            format!("{times}; more would need more memory than the {peak} in use before"),
        )
    } else {
        Chosen::new(value, times)
    })
}

/// Returns the bytes that may fall asleep at a time: what the faster of the links that take them, of `bytes_per_s`,
/// moves until a finished copy has started the next, and at least two fills of the queues of `queue_bytes`.
#[must_use]
pub fn inflight_bytes(bytes_per_s: u64, queue_bytes: u64, available_bytes: Option<u64>) -> Chosen {
    let on_the_way = u128::from(bytes_per_s) * u128::from(HANDOVER_NS) / 1_000_000_000;
    let on_the_way = u64::try_from(on_the_way).unwrap_or(u64::MAX);
    let wanted = on_the_way.max(queue_bytes.saturating_mul(2));
    let wanted = wanted.clamp(INFLIGHT_BYTES_START, INFLIGHT_BYTES_MAX);
    let (rate, queues) = (units::bytes(bytes_per_s), units::bytes(queue_bytes));
    let reason = match wanted {
        _ if bytes_per_s == 0 => "no link was measured yet".to_owned(),
        INFLIGHT_BYTES_START => format!("enough for {rate}/s and queues of {queues}"),
        wanted if wanted > on_the_way => format!("two fills of queues of {queues}"),
        _ => format!("{rate}/s until a finished copy starts the next"),
    };
    let room = available_bytes.map_or(u64::MAX, |bytes| bytes / AVAILABLE_DIVISOR);
    if room >= wanted {
        return Chosen::new(wanted, reason);
    }
    let available = units::bytes(available_bytes.unwrap_or_default());
    let reason = format!("an eighth of the {available} of memory that is available");
    Chosen::new(room.max(INFLIGHT_BYTES_MIN), reason)
}
