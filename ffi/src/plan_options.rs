//! Plan options and scoring, read from C.

use dormouse_schedule::{Loss, PlanOptions, Scoring, Span};

use crate::abi::v1::structs as c;
use crate::boundary::In;
use crate::fault::Fault;
use crate::plan::{check_ascending, machine, model};
use crate::runtime::usize_of;

/// Copies everything the options of a forest with `sequences` sequences point to.
///
/// # Safety
/// `pointer` is NULL or a struct that says its size, whose arrays have the lengths it says.
pub(crate) unsafe fn read(
    pointer: *const c::dormouse_plan_options_t,
    sequences: usize,
) -> Result<(Vec<Scoring>, PlanOptions), Fault> {
    // SAFETY: the caller's contract, here and for each array below, by the lengths it says.
    let it = unsafe { In::structure(pointer, "options") }?;
    let known = c::DORMOUSE_PLAN_LAST_LAYER_DEAD
        | c::DORMOUSE_PLAN_ALWAYS_SHARE
        | c::DORMOUSE_PLAN_RUNTIME_RESIDENCY;
    if it.flags & !known != 0 || it.reserved != 0 {
        return Err(Fault::argument(format!(
            "options.flags is {} and options.reserved {}; accepted: DORMOUSE_PLAN_* flags (mask {known}) and 0",
            it.flags, it.reserved
        )));
    }
    // Checked before anything of that size is allocated.
    if it.sequence_count != sequences as u64 {
        return Err(Fault::argument(format!(
            "options.sequence_count is {}; accepted: {sequences}, the forest's",
            it.sequence_count
        )));
    }
    let machine = if it.machine.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(machine(&unsafe { In::structure(it.machine, "options.machine") }?))
    };
    let flag = |flag: u64| it.flags & flag != 0;
    let options = PlanOptions {
        vocab: it.vocab,
        microbatch_rows: it.microbatch_rows,
        block_rows: it.block_rows,
        wake_window_layers: it.wake_window_layers,
        last_layer_dead: flag(c::DORMOUSE_PLAN_LAST_LAYER_DEAD),
        device_bytes: it.device_bytes,
        host_bytes: it.host_bytes,
        always_share: flag(c::DORMOUSE_PLAN_ALWAYS_SHARE),
        runtime_residency: flag(c::DORMOUSE_PLAN_RUNTIME_RESIDENCY),
        // SAFETY: as above.
        model: model(&unsafe { In::structure(it.model, "options.model") }?),
        machine,
    };
    // SAFETY: as above.
    Ok((unsafe { scoring(&it) }?, options))
}

/// # Safety
/// The arrays have the lengths the options state.
unsafe fn scoring(it: &c::dormouse_plan_options_t) -> Result<Vec<Scoring>, Fault> {
    let count = usize_of(it.sequence_count, "options.sequence_count")?;
    let weights = if it.weights.is_null() {
        None
    } else {
        // SAFETY: the caller's contract, here and below.
        Some(unsafe { In::slice(it.weights, count, "options.weights") }?)
    };
    let loss_from = if it.loss_from.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(unsafe { In::slice(it.loss_from, count, "options.loss_from") }?)
    };
    // SAFETY: as above.
    let spans = unsafe { spans(it, count) }?;
    if loss_from.is_some() && spans.is_some() {
        return Err(Fault::argument(
            "options.loss_from and options.span_offsets are both set; accepted: one of them",
        ));
    }
    let loss = |sequence: usize| {
        if let Some(from) = loss_from.and_then(|from| from.get(sequence)) {
            return Loss::From(*from);
        }
        match spans.as_ref().and_then(|(ends, spans)| {
            let (begin, end) = (*ends.get(sequence)?, *ends.get(sequence + 1)?);
            spans.get(begin as usize..end as usize)
        }) {
            None => Loss::AllButFirst,
            Some(spans) => {
                let span = |it: &c::dormouse_span_t| Span { begin: it.begin, end: it.end };
                Loss::Spans(spans.iter().map(span).collect())
            }
        }
    };
    let weight = |sequence| weights.and_then(|all| all.get(sequence).copied()).unwrap_or(1.0);
    Ok((0..count).map(|at| Scoring { loss: loss(at), weight: weight(at) }).collect())
}

/// Each sequence's spans, by ascending offsets into all of them.
type Spans<'a> = (&'a [u64], &'a [c::dormouse_span_t]);

/// # Safety
/// As [`scoring`].
unsafe fn spans<'a>(
    it: &c::dormouse_plan_options_t,
    count: usize,
) -> Result<Option<Spans<'a>>, Fault> {
    if it.span_offsets.is_null() || count == 0 {
        return Ok(None);
    }
    // SAFETY: the caller's contract, here and below.
    let ends = unsafe { In::slice(it.span_offsets, count + 1, "options.span_offsets") }?;
    check_ascending(ends, "options.span_offsets")?;
    let all = usize_of(ends.last().copied().unwrap_or(0), "options.span_offsets")?;
    // SAFETY: as above.
    Ok(Some((ends, unsafe { In::slice(it.spans, all, "options.spans") }?)))
}
