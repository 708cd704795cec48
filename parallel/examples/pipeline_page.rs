//! A pipeline drawn: `cargo run --release -p dormouse-parallel --example pipeline_page > page.html`.

use dormouse_parallel::draw::pipeline_page;
use dormouse_parallel::pipeline::{
    MemoryBounds, Pipeline, PipelineError, PipelineGroup, PipelineMicrobatch, PipelineRates,
    RowBytes, StageShare,
};

fn main() -> Result<(), PipelineError> {
    let microbatch =
        PipelineMicrobatch { rows: 4096, forward_ns: 40_000_000, backward_ns: 80_000_000 };
    let group = PipelineGroup {
        prefix_rows: 16_384,
        forward: StageShare { linear_ns: 150_000_000, pairs_ns: 50_000_000 },
        backward: StageShare { linear_ns: 300_000_000, pairs_ns: 100_000_000 },
        microbatches: vec![microbatch; 8],
    };
    let pipeline = Pipeline {
        stages: 4,
        virtual_stages: 1,
        groups: vec![group; 4],
        bounds: MemoryBounds { live_groups_max: 2, in_flight_max: 8 },
        rates: PipelineRates {
            op_overhead_ns: 500_000,
            transfer_latency_ns: 200_000,
            link_bytes_per_s: 50_000_000_000,
            ..PipelineRates::default()
        },
        row_bytes: RowBytes {
            activation: 8192,
            boundary: 8 * 12_288,
            prefix_saved: 8 * 65_536,
            microbatch_saved: 8 * 65_536,
        },
        ..Pipeline::default()
    };
    let stages = pipeline.plan()?;
    print!("{}", pipeline_page("Four groups in one stream", &pipeline, &stages)?);
    Ok(())
}
