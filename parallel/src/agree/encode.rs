//! What is encoded of inputs, options and collectives. Every field is named here by hand: a field
//! that is added must be added here too, which the patterns without `..` make the compiler say.

use super::{Digest, Encoder};
use crate::balance::{
    Collective, Exchange, Kind, Method, Options, Share, Shares, Transfer, Unit, Workload,
};
use dormouse_schedule::forest::{Ending, Node};
use dormouse_schedule::{Machine, ModelShape};

pub(super) fn inputs(batch: &Workload<'_>) -> Digest {
    let Workload { forest, groups, logit_rows } = batch;
    let mut to = Encoder::new("inputs");
    to.number(forest.nodes().len() as u64);
    for Node { parent, tokens, subtree_end, sequence } in forest.nodes() {
        // No parent is 0, so that a parent is never taken for none.
        to.number(parent.map_or(0, |parent| u64::from(parent.0) + 1));
        to.number(tokens.begin).number(tokens.end).number(*subtree_end).number(*sequence);
    }
    to.number(forest.endings().len() as u64);
    for Ending { node, tokens } in forest.endings() {
        to.number(node.0).number(*tokens);
    }
    to.numbers(groups.iter().copied()).numbers(logit_rows.iter().copied());
    to.digest()
}

pub(super) fn options(options: &Options, budget_bytes: u64) -> Digest {
    let Options {
        ranks,
        method,
        unit,
        exchange,
        ops_hold_collectives,
        microbatch_tokens,
        rates,
        model,
        machine,
    } = options;
    let mut to = Encoder::new("options");
    to.number(*ranks);
    to.number(match method {
        Method::Contiguous => 0_u32,
        Method::Greedy => 1,
        Method::LongestFirst => 2,
    });
    to.number(match unit {
        Unit::Leaf => 0_u32,
        Unit::Group => 1,
        Unit::Tree => 2,
        Unit::GroupOrLeaf => 3,
    });
    to.number(*exchange).number(*ops_hold_collectives).number(*microbatch_tokens);
    for rate in rates.to_array() {
        to.fraction(rate);
    }
    encode_model(&mut to, model);
    encode_machine(&mut to, machine);
    to.number(budget_bytes);
    to.digest()
}

fn encode_model(to: &mut Encoder, model: &ModelShape) {
    let ModelShape {
        layers,
        heads,
        kv_heads,
        head_dim,
        dtype_bytes,
        layer_linear_weights,
        kv_linear_weights,
        last_layer_prefix_weights,
        head_weights,
        saved_bytes_per_token_layer,
    } = *model;
    to.numbers([layers, heads, kv_heads, head_dim, dtype_bytes].into_iter());
    to.numbers(
        [
            layer_linear_weights,
            kv_linear_weights,
            last_layer_prefix_weights,
            head_weights,
            saved_bytes_per_token_layer,
        ]
        .into_iter(),
    );
}

fn encode_machine(to: &mut Encoder, machine: &Machine) {
    let Machine {
        flops_per_s,
        device_bytes,
        sleep_bytes_per_s,
        wake_bytes_per_s,
        host_bytes,
        nvme_write_bytes_per_s,
        nvme_read_bytes_per_s,
        link_bytes_per_s,
        op_overhead_ns,
    } = *machine;
    let fields = [
        flops_per_s,
        device_bytes,
        sleep_bytes_per_s,
        wake_bytes_per_s,
        host_bytes,
        nvme_write_bytes_per_s,
        nvme_read_bytes_per_s,
        link_bytes_per_s,
        op_overhead_ns,
    ];
    to.numbers(fields.into_iter());
}

/// Everything that ranks do together and who takes which part in it; costs are left out.
pub(super) fn collectives(shares: &Shares) -> Digest {
    let mut to = Encoder::new("collectives");
    to.number(shares.shares.len() as u64);
    for Share {
        leaves,
        sequences,
        features,
        dummy_microbatches,
        dummy_forwards,
        dummy_backwards,
        ..
    } in &shares.shares
    {
        to.numbers(
            leaves.iter().flat_map(|run| [run.begin, run.end]).collect::<Vec<_>>().into_iter(),
        );
        to.numbers(sequences.iter().copied()).number(features.microbatches);
        to.number(*dummy_microbatches).number(*dummy_forwards).number(*dummy_backwards);
    }
    to.number(shares.exchanges.len() as u64);
    for exchange in &shares.exchanges {
        let Exchange {
            node,
            transfer,
            from,
            to: others,
            kv_bytes,
            gradient_bytes,
            forward_at,
            backward_at,
        } = exchange;
        to.number(node.0).number(match transfer {
            Transfer::Send => 0_u32,
            Transfer::Divide => 1,
        });
        to.number(*from).number(others.begin).number(others.end);
        to.number(*kv_bytes).number(*gradient_bytes).number(*forward_at).number(*backward_at);
    }
    to.number(shares.collectives.len() as u64);
    for collective in &shares.collectives {
        match collective {
            Collective::NodeForward { exchange } => to.number(0_u32).number(*exchange),
            Collective::Op { op } => to.number(1_u32).number(kind(*op)),
            Collective::PrefixBackward { exchange } => to.number(2_u32).number(*exchange),
            Collective::ParameterGradients => to.number(3_u32),
        };
    }
    to.number(shares.lockstep.own.len() as u64);
    for own in &shares.lockstep.own {
        to.numbers(own.iter().copied());
    }
    to.digest()
}

const fn kind(kind: Kind) -> u32 {
    match kind {
        Kind::Forward => 0,
        Kind::Microbatch => 1,
        Kind::Backward => 2,
    }
}
