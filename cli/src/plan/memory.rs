//! Picture of a plan's memory over time.

use dormouse_parallel::draw::{Series, memory_svg};
use dormouse_schedule::cost::{Features, PASSES, Rates};
use dormouse_schedule::{Op, OpKind, Plan, PlanError, Span};

use super::Setting;

const NANOSECONDS: f64 = 1e9;
/// Share of the forward in a row's operations.
const FORWARD_SHARE: f64 = 1.0 / 3.0;

/// Draws the device and host bytes of a plan's ops over time, which ends with the predicted time of the plan:
/// ops take as much of it as of their counted time. `None` if `flops_per_s` is unknown.
pub(super) fn picture(setting: &Setting<'_>, plan: &Plan) -> Result<Option<String>, PlanError> {
    let Some(machine) = setting.machine.filter(|machine| machine.flops_per_s > 0) else {
        return Ok(None);
    };
    let rates = Rates::counted(&setting.model.shape, &machine)?;
    let (starts_s, end_s) = times(plan, &rates);
    let (mut device, mut host) = (Vec::new(), Vec::new());
    for (op, start_s) in plan.ops().iter().zip(starts_s) {
        // A float cast saturates.
        let ns = (start_s * NANOSECONDS) as u64;
        device.push((ns, op.device_bytes));
        host.push((ns, op.host_bytes));
    }
    let series = [("device", device), ("host", host)]
        .map(|(name, points)| Series { name: name.to_owned(), points });
    Ok(Some(memory_svg(&series, (end_s * NANOSECONDS) as u64)))
}

/// Returns the start of each op and the end of the plan, which is its predicted time.
fn times(plan: &Plan, rates: &Rates) -> (Vec<f64>, f64) {
    let counted: Vec<f64> = plan.ops().iter().map(|op| seconds(op, plan, rates)).collect();
    let counted_s: f64 = counted.iter().sum();
    let end_s = plan.predict().seconds_shared.unwrap_or(counted_s);
    let scale = if counted_s > 0.0 { end_s / counted_s } else { 1.0 };
    let (mut starts, mut now_s) = (Vec::with_capacity(counted.len()), 0.0);
    for seconds in counted {
        starts.push(now_s);
        now_s += seconds * scale;
    }
    (starts, end_s)
}

/// Returns the time of an op without stalls.
fn seconds(op: &Op, plan: &Plan, rates: &Rates) -> f64 {
    let run = |rows: Span| Features {
        rows: rows.count(),
        prefix_pairs: rows.count().saturating_mul(rows.begin),
        causal_pairs: rows.count().saturating_mul(rows.count() + 1) / 2,
        ..Features::default()
    };
    // The overhead of a forward or a backward; a microbatch has both.
    let op_s = rates.microbatches / PASSES;
    let scored = op.scores.iter().map(|score| score.rows.count()).sum();
    let logits = Features { logit_rows: scored, ..Features::default() };
    match &op.kind {
        OpKind::PrefixForward { tokens, .. } | OpKind::ForwardAgain { tokens, .. } => {
            op_s + FORWARD_SHARE * rates.seconds(&run(*tokens))
        }
        OpKind::Microbatch { members, .. } => {
            let rows = members.iter().map(|member| {
                let begin = member.first_position;
                run(Span { begin, end: begin + member.rows.count() })
            });
            let all = rows.fold(logits, Features::plus);
            PASSES * op_s + rates.seconds(&all)
        }
        OpKind::PrefixBackward { node, .. } => {
            let rows = plan.nodes().get(node.0 as usize).map_or(Span::default(), |node| node.rows);
            op_s + (1.0 - FORWARD_SHARE) * rates.seconds(&run(rows)) + rates.seconds(&logits)
        }
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use dormouse_schedule::forest::{Ending, Forest, NO_PARENT};
    use dormouse_schedule::{Loss, Machine, NodeId, Scoring};

    use super::*;
    use crate::{Model, PlanArgs};

    /// A prompt, two responses of a twentieth of it, and seconds of each op.
    fn seconds_of(prompt: u64, op_overhead_ns: u64) -> (Plan, Vec<f64>) {
        let model = Model::find(Path::new("llama3-8b")).unwrap();
        let machine =
            Machine { flops_per_s: 400_000_000_000_000, op_overhead_ns, ..Machine::default() };
        let args = PlanArgs { always_share: true, ..PlanArgs::default() };
        let setting = Setting { args: &args, model: &model, machine: Some(machine) };
        let own = prompt / 20;
        let ending = |node| Ending { node: NodeId(node), tokens: prompt + own };
        let forest = Forest::from_nodes_with(
            &[NO_PARENT, 0, 0],
            &[prompt, own, own],
            &[ending(1), ending(2)],
        );
        let scoring = [prompt; 2].map(|prompt| Scoring { loss: Loss::From(prompt), weight: 1.0 });
        let plan = Plan::new(&forest.unwrap(), &scoring, &setting.options());
        let plan = plan.unwrap();
        let rates = Rates::counted(&model.shape, &machine).unwrap();
        let seconds = plan.ops().iter().map(|op| seconds(op, &plan, &rates)).collect();
        (plan, seconds)
    }

    /// The two models count the same work differently: rates here, weights and layers in the prediction,
    /// which omits dead work of the last layer.
    #[test]
    fn op_times_add_up_to_the_prediction() {
        for prompt in [2_000, 200_000] {
            let (plan, seconds) = seconds_of(prompt, 0);
            let predicted = plan.predict().seconds_shared.unwrap();
            let ratio = seconds.iter().sum::<f64>() / predicted;
            assert!((1.0..1.1).contains(&ratio), "{prompt}: {ratio}");
        }
    }

    #[test]
    fn the_picture_ends_with_the_predicted_time() {
        let (plan, _) = seconds_of(200_000, 1_000_000);
        let rates = Rates::counted(&plan.options().model, &plan.options().machine.unwrap());
        let (starts, end_s) = times(&plan, &rates.unwrap());
        assert_eq!(Some(end_s), plan.predict().seconds_shared);
        assert_eq!((starts.len(), starts[0]), (plan.ops().len(), 0.0));
        let done = starts[starts.len() - 1];
        assert!((done / end_s - 1.0).abs() < 1e-12, "the last op ends at {done} of {end_s}");
        assert!(starts.is_sorted());
    }

    #[test]
    fn a_backward_takes_twice_its_forward_and_each_of_them_its_overhead() {
        let (plan, seconds) = seconds_of(2_000, 0);
        let of = |is: fn(&OpKind) -> bool| {
            seconds[plan.ops().iter().position(|op| is(&op.kind)).unwrap()]
        };
        let forward = of(|kind| matches!(kind, OpKind::PrefixForward { .. }));
        let backward = of(|kind| matches!(kind, OpKind::PrefixBackward { .. }));
        // The prompt scores nothing.
        assert!((backward / forward - 2.0).abs() < 1e-9, "{forward} and {backward}");
        let (_, slow) = seconds_of(2_000, 1_000_000_000);
        for ((slow, quick), op) in slow.iter().zip(&seconds).zip(plan.ops()) {
            let passes = match op.kind {
                OpKind::Microbatch { .. } => 2.0,
                _ if *quick > 0.0 => 1.0,
                _ => 0.0,
            };
            assert_eq!((slow - quick).round(), passes, "{:?}", op.kind);
        }
    }
}
