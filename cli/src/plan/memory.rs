//! A plan's memory over time, for a picture.

use dormouse_schedule::cost::{Features, Rates};
use dormouse_schedule::draw::{Series, memory_svg};
use dormouse_schedule::{Op, OpKind, Plan, PlanError, Span};

use super::Setting;

const NANOSECONDS: f64 = 1e9;
/// Of a row's operations, those of a forward.
const FORWARD_SHARE: f64 = 1.0 / 3.0;

/// The device's and the host's bytes of a plan's ops, over the time that the ops take by counting;
/// none where the machine's rate is not known.
pub(super) fn picture(setting: &Setting<'_>, plan: &Plan) -> Result<Option<String>, PlanError> {
    let Some(machine) = setting.machine.filter(|machine| machine.flops_per_s > 0) else {
        return Ok(None);
    };
    let rates = Rates::counted(&setting.model.shape, &machine)?;
    let (mut device, mut host) = (Vec::new(), Vec::new());
    let mut now_s = 0.0;
    for op in plan.ops() {
        // A float cast saturates.
        let ns = (now_s * NANOSECONDS) as u64;
        device.push((ns, op.device_bytes));
        host.push((ns, op.host_bytes));
        now_s += seconds(op, plan, &rates);
    }
    let series = [("device", device), ("host", host)]
        .map(|(name, points)| Series { name: name.to_owned(), points });
    Ok(Some(memory_svg(&series, (now_s * NANOSECONDS) as u64)))
}

/// What an op takes, stalls apart.
fn seconds(op: &Op, plan: &Plan, rates: &Rates) -> f64 {
    let run = |rows: Span| Features {
        rows: rows.count(),
        prefix_pairs: rows.count().saturating_mul(rows.begin),
        causal_pairs: rows.count().saturating_mul(rows.count() + 1) / 2,
        ..Features::default()
    };
    // One op, as a wave is one.
    let op_s = rates.waves;
    let scored = op.scores.iter().map(|score| score.rows.count()).sum();
    let logits = Features { logit_rows: scored, ..Features::default() };
    match &op.kind {
        OpKind::PrefixForward { tokens, .. } | OpKind::ForwardAgain { tokens, .. } => {
            op_s + FORWARD_SHARE * rates.seconds(&run(*tokens))
        }
        OpKind::Wave { members, .. } => {
            let rows = members.iter().map(|member| {
                let begin = member.first_position;
                run(Span { begin, end: begin + member.rows.count() })
            });
            let all = rows.fold(logits, Features::plus);
            op_s + rates.seconds(&all)
        }
        OpKind::NodeBackward { node, .. } => {
            let rows = plan.nodes().get(node.0 as usize).map_or(Span::default(), |node| node.rows);
            op_s + (1.0 - FORWARD_SHARE) * rates.seconds(&run(rows)) + rates.seconds(&logits)
        }
        _ => 0.0,
    }
}
