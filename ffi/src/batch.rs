//! What of a forest's sequences is scored, read from C.

use dormouse_schedule::{Batch, Loss, Scoring, Span};

use crate::abi::v1::structs as c;
use crate::boundary::In;
use crate::fault::Fault;
use crate::plan::{check_ascending, machine, model};
use crate::runtime::usize_of;

/// Copies everything a batch of so many sequences points to; its forest is left empty.
///
/// # Safety
/// `pointer` is NULL or a struct that says its size, whose arrays have the lengths it says.
pub(crate) unsafe fn read(
    pointer: *const c::dormouse_batch_t,
    sequences: usize,
) -> Result<Batch, Fault> {
    // SAFETY: the caller's contract, here and for each array below, by the lengths it says.
    let it = unsafe { In::structure(pointer, "batch") }?;
    let known = c::DORMOUSE_BATCH_LAST_LAYER_DEAD | c::DORMOUSE_BATCH_ALWAYS_SHARE;
    if it.flags & !known != 0 || it.reserved != 0 {
        return Err(Fault::argument(format!(
            "batch.flags is {} and batch.reserved {}; DORMOUSE_BATCH_LAST_LAYER_DEAD ({}) and \
             DORMOUSE_BATCH_ALWAYS_SHARE ({}) added up, and 0, are accepted",
            it.flags,
            it.reserved,
            c::DORMOUSE_BATCH_LAST_LAYER_DEAD,
            c::DORMOUSE_BATCH_ALWAYS_SHARE
        )));
    }
    // Before anything is made of that size.
    if it.sequence_count != sequences as u64 {
        return Err(Fault::argument(format!(
            "batch.sequence_count is {}; {sequences}, as the forest has, is accepted",
            it.sequence_count
        )));
    }
    let machine = if it.machine.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(machine(&unsafe { In::structure(it.machine, "batch.machine") }?))
    };
    Ok(Batch {
        // SAFETY: as above.
        scoring: unsafe { scoring(&it) }?,
        vocab: it.vocab,
        microbatch_rows: it.microbatch_rows,
        block_rows: it.block_rows,
        wake_window_layers: it.wake_window_layers,
        last_layer_dead: it.flags & c::DORMOUSE_BATCH_LAST_LAYER_DEAD != 0,
        device_bytes: it.device_bytes,
        host_bytes: it.host_bytes,
        always_share: it.flags & c::DORMOUSE_BATCH_ALWAYS_SHARE != 0,
        // SAFETY: as above.
        model: model(&unsafe { In::structure(it.model, "batch.model") }?),
        machine,
        ..Batch::default()
    })
}

/// # Safety
/// The arrays have the lengths the batch says.
unsafe fn scoring(it: &c::dormouse_batch_t) -> Result<Vec<Scoring>, Fault> {
    let count = usize_of(it.sequence_count, "batch.sequence_count")?;
    let weights = if it.weights.is_null() {
        None
    } else {
        // SAFETY: the caller's contract, here and below.
        Some(unsafe { In::slice(it.weights, count, "batch.weights") }?)
    };
    let loss_from = if it.loss_from.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(unsafe { In::slice(it.loss_from, count, "batch.loss_from") }?)
    };
    // SAFETY: as above.
    let spans = unsafe { spans(it, count) }?;
    if loss_from.is_some() && spans.is_some() {
        return Err(Fault::argument(
            "batch.loss_from and batch.span_offsets are both given; one of them is accepted",
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
unsafe fn spans<'a>(it: &c::dormouse_batch_t, count: usize) -> Result<Option<Spans<'a>>, Fault> {
    if it.span_offsets.is_null() || count == 0 {
        return Ok(None);
    }
    // SAFETY: the caller's contract, here and below.
    let ends = unsafe { In::slice(it.span_offsets, count + 1, "batch.span_offsets") }?;
    check_ascending(ends, "batch.span_offsets")?;
    let all = usize_of(ends.last().copied().unwrap_or(0), "batch.span_offsets")?;
    // SAFETY: as above.
    Ok(Some((ends, unsafe { In::slice(it.spans, all, "batch.spans") }?)))
}
