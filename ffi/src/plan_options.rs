//! Plan options and scoring, read from C.

use dormouse_schedule::{Loss, Machine, ModelShape, PlanOptions, Scoring, Span};

use crate::abi::c;
use crate::boundary::{In, check_flags, check_reserved, usize_of};
use crate::fault::Fault;

/// Copies the options of a plan of `sequences` sequences.
///
/// # Safety
/// `pointer` is NULL or a struct with its size set, whose arrays have the lengths that it states.
pub(crate) unsafe fn read(
    pointer: *const c::dormouse_plan_options_t,
    sequences: usize,
) -> Result<(Vec<Scoring>, PlanOptions), Fault> {
    // SAFETY: the caller's contract, here and below, for each array by the length that it states.
    let it = unsafe { In::structure(pointer, "options") }?;
    let known = c::DORMOUSE_PLAN_LAST_LAYER_DEAD
        | c::DORMOUSE_PLAN_ALWAYS_SHARE
        | c::DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    check_flags(it.flags, known, "options.flags", "DORMOUSE_PLAN_*")?;
    check_reserved(it.reserved, "options.reserved")?;
    // Checked before an allocation of that size.
    if it.sequence_count != sequences as u64 {
        let seen = it.sequence_count;
        return Err(Fault::argument(format!(
            "options.sequence_count is {seen}; accepted: {sequences}, the forest's"
        )));
    }
    // SAFETY: as above.
    let model = model(&unsafe { In::structure(it.model, "options.model") }?)?;
    let flag = |flag: u64| it.flags & flag != 0;
    let mut options = PlanOptions {
        vocab: it.vocab,
        microbatch_rows: it.microbatch_rows,
        block_rows: it.block_rows,
        wake_window_layers: it.wake_window_layers,
        last_layer_dead: flag(c::DORMOUSE_PLAN_LAST_LAYER_DEAD),
        device_bytes: it.device_bytes,
        host_bytes: it.host_bytes,
        always_share: flag(c::DORMOUSE_PLAN_ALWAYS_SHARE),
        runtime_residency: flag(c::DORMOUSE_PLAN_RUNTIME_RESIDENCY),
        model,
        machine: None,
    };
    if !it.machine.is_null() {
        // SAFETY: as above.
        options.machine = Some(machine(&unsafe { In::structure(it.machine, "options.machine") }?));
    }
    // SAFETY: as above.
    Ok((unsafe { scoring(&it, sequences) }?, options))
}

/// # Safety
/// The arrays have the lengths that the options state.
unsafe fn scoring(
    it: &c::dormouse_plan_options_t,
    sequences: usize,
) -> Result<Vec<Scoring>, Fault> {
    let length = |pointer_is_null: bool| if pointer_is_null { 0 } else { sequences };
    // SAFETY: the caller's contract, here and below.
    let (weights, loss_from, offsets) = unsafe {
        (
            In::slice(it.weights, length(it.weights.is_null()), "options.weights")?,
            In::slice(it.loss_from, length(it.loss_from.is_null()), "options.loss_from")?,
            In::offsets(
                it.span_offsets,
                length(it.span_offsets.is_null()),
                "options.span_offsets",
            )?,
        )
    };
    if !loss_from.is_empty() && !offsets.is_empty() {
        return Err(Fault::argument(
            "options.loss_from and options.span_offsets are both set; accepted: one of them",
        ));
    }
    let all = usize_of(offsets.last().copied().unwrap_or(0), "options.span_offsets")?;
    // SAFETY: as above.
    let spans = unsafe { In::slice(it.spans, all, "options.spans") }?;
    let span = |it: &c::dormouse_span_t| Span { begin: it.begin, end: it.end };
    let loss = |at: usize| match (loss_from.get(at), offsets.get(at..at + 2)) {
        (Some(from), _) => Loss::From(*from),
        (None, Some(&[begin, end])) => {
            Loss::Spans(spans[begin as usize..end as usize].iter().map(span).collect())
        }
        _ => Loss::AllButFirst,
    };
    let weight = |at: usize| weights.get(at).copied().unwrap_or(1.0);
    Ok((0..sequences).map(|at| Scoring { loss: loss(at), weight: weight(at) }).collect())
}

fn model(it: &c::dormouse_model_t) -> Result<ModelShape, Fault> {
    check_reserved(it.reserved, "options.model.reserved")?;
    Ok(ModelShape {
        layers: it.layers,
        heads: it.heads,
        kv_heads: it.kv_heads,
        head_dim: it.head_dim,
        dtype_bytes: it.dtype_bytes,
        layer_linear_weights: it.layer_linear_weights,
        kv_linear_weights: it.kv_linear_weights,
        last_layer_prefix_weights: it.last_layer_prefix_weights,
        head_weights: it.head_weights,
        saved_bytes_per_token_layer: it.saved_bytes_per_token_layer,
    })
}

fn machine(it: &c::dormouse_machine_t) -> Machine {
    Machine {
        flops_per_s: it.flops_per_s,
        device_bytes: it.device_bytes,
        sleep_bytes_per_s: it.sleep_bytes_per_s,
        wake_bytes_per_s: it.wake_bytes_per_s,
        host_bytes: it.host_bytes,
        nvme_write_bytes_per_s: it.nvme_write_bytes_per_s,
        nvme_read_bytes_per_s: it.nvme_read_bytes_per_s,
        link_bytes_per_s: it.link_bytes_per_s,
        op_overhead_ns: it.op_overhead_ns,
        prefix_attention_flops_per_s: it.prefix_attention_flops_per_s,
        causal_attention_flops_per_s: it.causal_attention_flops_per_s,
    }
}
