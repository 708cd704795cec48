//! What a layer's mark costs where there is nothing to do: prints one line of JSON.
//!
//! A prefix of 32 layers on the host device goes through its phases; every mark is timed with its
//! fellows of the phase, and the median of many prefixes is what counts.
#![allow(clippy::print_stdout, reason = "its output")]
#![expect(unsafe_code, reason = "the calling thread's stream by address")]

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_offload::{Edge, Engine, EngineConfig, Phase, Prefix};
use dormouse_timeline::Timeline;

const LAYERS: u32 = 32;
const PREFIXES: usize = 2_000;
/// Of the layers that sleep.
const REGIONS_PER_LAYER: usize = 20;
const REGION_BYTES: usize = 64 << 10;
const BUDGET_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Arc::new(HostDevice::new(HostConfig::new(4 << 30, BUDGET_BYTES))?);
    let config = Config::new(device.page_bytes(), BUDGET_BYTES);
    let allocator = Arc::new(Allocator::new(device, config, Arc::new(Timeline::new(1 << 16)))?);
    // SAFETY: NULL is the calling thread.
    let stream = unsafe { allocator.device().foreign_stream(std::ptr::null_mut())? };
    allocator.register_stream(0, stream.clone())?;
    let settings = EngineConfig { host_bytes_max: BUDGET_BYTES, ..EngineConfig::default() };
    let engine = Engine::new(Arc::clone(&allocator), settings, Arc::new(Timeline::new(1 << 16)))?;

    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for _ in 0..PREFIXES {
        let mut prefix = engine.prefix(LAYERS, "bench")?;
        prefix.enter(Phase::A, &stream)?;
        forward.push(marks_ns(
            &mut prefix,
            &stream,
            [Edge::ForwardBegin, Edge::ForwardEnd],
            0..LAYERS,
        )?);
        prefix.enter(Phase::B, &stream)?;
        prefix.enter(Phase::C, &stream)?;
        let edges = [Edge::BackwardBegin, Edge::BackwardEnd];
        backward.push(marks_ns(&mut prefix, &stream, edges, (0..LAYERS).rev())?);
        drop(prefix.close());
    }

    // The same with all layers below asleep: the first half saves, the second has nothing to do.
    let mut behind = Vec::new();
    for _ in 0..PREFIXES / 100 {
        let mut prefix = engine.prefix(LAYERS, "bench")?;
        prefix.enter(Phase::A, &stream)?;
        let mut blocks = Vec::new();
        for layer in 0..LAYERS / 2 {
            prefix.mark(Edge::ForwardBegin, layer, &stream)?;
            let (scope, arena) = (prefix.scope(layer)?, prefix.arena());
            let request = Request { scope, arena, ..Request::new(REGION_BYTES) };
            let saved: Result<Vec<usize>, _> = (0..REGIONS_PER_LAYER)
                .map(|_| allocator.allocate(&request).map(|block| block.range.start))
                .collect();
            let saved = saved?;
            prefix.dormant(layer, &saved)?;
            blocks.extend(saved);
            prefix.mark(Edge::ForwardEnd, layer, &stream)?;
        }
        // The first of them lets the last of the others go.
        marks_ns(
            &mut prefix,
            &stream,
            [Edge::ForwardBegin, Edge::ForwardEnd],
            LAYERS / 2..LAYERS / 2 + 1,
        )?;
        let rest = LAYERS / 2 + 1..LAYERS;
        behind.push(marks_ns(&mut prefix, &stream, [Edge::ForwardBegin, Edge::ForwardEnd], rest)?);
        drop(prefix.close());
        for block in blocks {
            engine.free(block, 0)?;
        }
    }
    println!(
        "{{\"forward_ns\": {}, \"backward_ns\": {}, \"behind_sleepers_ns\": {}}}",
        median(forward),
        median(backward),
        median(behind)
    );
    Ok(())
}

/// Nanoseconds a mark of these layers.
fn marks_ns<D: Device>(
    prefix: &mut Prefix<D>,
    stream: &D::Stream,
    edges: [Edge; 2],
    layers: impl ExactSizeIterator<Item = u32>,
) -> Result<f64, Box<dyn Error>> {
    let marks = layers.len() * edges.len();
    let start = Instant::now();
    for layer in layers {
        for edge in edges {
            prefix.mark(edge, layer, stream)?;
        }
    }
    Ok(start.elapsed().as_nanos() as f64 / marks as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
