//! Sizes and offsets, in bytes, of every struct of the header: what compiled programs rely on.

use super::c::*;
use super::plugin::dormouse_plugin_v1_t;

/// The crate's tests compile only if the struct has this size and its fields these offsets.
macro_rules! pinned {
    ($name:ident $bytes:literal: $($field:ident $offset:literal),+) => {
        const _: () = {
            assert!(size_of::<$name>() == $bytes);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)+
        };
    };
}

// The rows are those of the C compiler: `ffi/tests/suite/layouts.rs` compares them, and rewrites them with UPDATE=1.
pinned! { dormouse_param_t 1080: size 0, version 4, name 8, kind 16, built_in 24, accepts 32, help 40, provenance 48, reserved 52, value 56, reason 568 }
pinned! { dormouse_options_t 72: size 0, version 4, device_kind 8, device_ordinal 12, alloc_budget_bytes 16, host_budget_bytes 24, nvme_dir 32, nvme_file_bytes 40, inflight_bytes 48, io_threads 56, window_layers 60, checksum 64, reserved 68 }
pinned! { dormouse_info_t 616: size 0, version 4, device_kind 8, device_ordinal 12, page_bytes 16, modes 24, tier_flags 32, instance_id 40, alloc_budget_bytes 48, host_budget_bytes 56, nvme_file_bytes 64, heap_min_bytes 72, nvme_write_bytes_per_s 80, nvme_read_bytes_per_s 88, window_layers 96, reserved 100, unavailable_reason 104 }
pinned! { dormouse_gauge_t 24: current_bytes 0, peak_bytes 8, count 16 }
pinned! { dormouse_copies_t 16: count 0, bytes 8 }
pinned! { dormouse_amount_t 24: current 0, peak 8, added_total 16 }
pinned! { dormouse_pool_t 72: allocated_bytes 0, active_bytes 8, requested_bytes 16, mapped_bytes 24, inactive_split_bytes 32, allocations 40, active_blocks 48, segments 56, inactive_splits 64 }
pinned! { dormouse_stats_t 760: size 0, version 4, allocated 8, requested 32, mapped 56, cached 80, asleep 104, tiers 128, roles 200, copies 320, stall_ns 384, alloc_retries 392, alloc_failures 400, declined 408, nvme_written_bytes 416, nvme_write_budget_bytes 424, nvme_write_left_bytes 432, active 440, inactive_split 464, stray_wakes 488, allocations 496, segments 520, allocated_total_bytes 544, active_total_bytes 552, requested_total_bytes 560, mapped_total_bytes 568, inactive_split_total_bytes 576, map_calls 584, unmap_calls 592, stream_waits 600, allocated_interval_peak_bytes 608, pools 616 }
pinned! { dormouse_mem_info_t 112: size 0, version 4, base 8, bytes 16, requested_bytes 24, state 32, tier 36, role 40, layer 44, name 48 }
pinned! { dormouse_ending_t 16: node 0, reserved 4, tokens 8 }
pinned! { dormouse_sequences_t 88: size 0, version 4, ids 8, offsets 16, kinds 24, sequence_count 32, id_bytes 40, vocab 44, parents 48, lengths 56, endings 64, node_count 72, flags 80 }
pinned! { dormouse_forest_info_t 64: size 0, version 4, sequences 8, nodes 16, roots 24, leaves 32, tree_tokens 40, dense_tokens 48, compression 56 }
pinned! { dormouse_forest_node_t 32: parent 0, subtree_end 4, sequence 8, reserved 12, token_begin 16, token_end 24 }
pinned! { dormouse_span_t 16: begin 0, end 8 }
pinned! { dormouse_model_t 72: size 0, version 4, layers 8, heads 12, kv_heads 16, head_dim 20, dtype_bytes 24, reserved 28, layer_linear_weights 32, kv_linear_weights 40, last_layer_prefix_weights 48, head_weights 56, saved_bytes_per_token_layer 64 }
pinned! { dormouse_machine_t 96: size 0, version 4, flops_per_s 8, device_bytes 16, sleep_bytes_per_s 24, wake_bytes_per_s 32, host_bytes 40, nvme_write_bytes_per_s 48, nvme_read_bytes_per_s 56, link_bytes_per_s 64, op_overhead_ns 72, prefix_attention_flops_per_s 80, causal_attention_flops_per_s 88 }
pinned! { dormouse_plan_options_t 112: size 0, version 4, sequence_count 8, loss_from 16, span_offsets 24, spans 32, weights 40, vocab 48, microbatch_rows 52, block_rows 56, wake_window_layers 64, reserved 68, flags 72, device_bytes 80, host_bytes 88, model 96, machine 104 }
pinned! { dormouse_member_t 56: sequence 0, node 4, row_begin 8, row_end 16, first_position 24, token_begin 32, token_end 40, weight 48 }
pinned! { dormouse_score_t 40: sequence 0, reserved 4, row_begin 8, row_end 16, first_label 24, weight 32 }
pinned! { dormouse_op_t 120: size 0, version 4, id 8, kind 16, node 20, token_begin 24, token_end 32, members 40, member_count 48, last 52, wake_window_layers 56, reserved 60, flags 64, scores 72, score_count 80, reads 88, residency 92, asleep 96, waking 100, device_bytes 104, host_bytes 112 }
pinned! { dormouse_plan_node_t 40: parent 0, subtree_end 4, sequence 8, origin 12, row_begin 16, row_end 24, residency 32, reserved 36 }
pinned! { dormouse_prediction_t 688: size 0, version 4, flops_dense 8, flops_shared 16, speedup 24, token_ratio 32, peak_bytes 40, sleep_bytes 64, pays 72, reserved 76, reason 80, seconds_dense 592, seconds_shared 600, sleep_stall_s 608, wake_stall_s 616, residency_gap 624, recomputed_rows 632, device_bytes 640, host_bytes 664 }
pinned! { dormouse_prefix_report_t 1240: size 0, version 4, dormant_bytes 8, boundary_bytes 16, asleep_bytes_peak 24, asleep_at_b_bytes 32, tier_bytes_peak 40, written_bytes 64, read_bytes 72, write_bytes_per_s 80, read_bytes_per_s 88, stall_ns 96, stall_bound_ns 104, phase_peak_bytes 112, left_asleep_bytes 136, accepted_count 144, refused_count 152, peak_phase 160, reserved 164, declined 168, is_planned 680, reserved_planned 684, planned_bytes 688, planned_stall_ns 712, stray_wakes 720, first_stray 728 }
pinned! { dormouse_merge_args_t 88: size 0, version 4, out1 8, lse1 16, out2 24, lse2 32, out 40, lse 48, rows 56, head_dim 64, dtype 72, reserved 76, flags 80 }
pinned! { dormouse_history_options_t 48: size 0, version 4, vocab 8, epochs_kept 12, budget_bytes 16, weighing 24, reserved 28, dir 32, cold_bytes 40 }
pinned! { dormouse_tokens_t 24: ids 0, count 8, id_bytes 16, reserved 20 }
pinned! { dormouse_digest_t 16: low 0, high 8 }
pinned! { dormouse_rollout_t 56: prompt 0, response 24, reward 48, epoch 52 }
pinned! { dormouse_draft_t 72: prompt 0, end 16, ids 40, capacity 48, window_tokens 52, count 56, matched_tokens 60, accepted 64, reserved 68 }
pinned! { dormouse_history_stats_t 72: size 0, version 4, prompts 8, tokens 16, bytes 24, cold_prompts 32, cold_bytes 40, forgotten_prompts 48, drafted_tokens 56, accepted_tokens 64 }
pinned! { dormouse_dialogue_options_t 56: size 0, version 4, dimension 8, alpha 12, entries_max 16, scanned_entries 24, decay_s 32, dir 40, unsynced 48, reserved 52 }
pinned! { dormouse_bytes_t 16: bytes 0, count 8 }
pinned! { dormouse_turn_t 72: embedding 0, dimension 8, query 16, passage 32, response 48, time_s 64 }
pinned! { dormouse_query_t 32: embedding 0, dimension 8, now_s 16, entries_max 24, kind 28 }
pinned! { dormouse_found_t 32: id 0, time_s 8, weight 16, relevance 20, recency 24, reserved 28 }
pinned! { dormouse_dialogue_stats_t 48: size 0, version 4, entries 8, forgotten_entries 16, categories 24, summaries 32, log_bytes 40 }
pinned! { dormouse_block_t 40: base 0, bytes 8, requested_bytes 16, stream 24, state 32, reserved 36 }
pinned! { dormouse_memory_history_t 40: size 0, version 4, range_count 8, event_count 16, recorded_count 24, events_max 32 }
pinned! { dormouse_range_t 80: address 0, bytes 8, requested_bytes 16, stream 24, scope 32, pool_first 40, pool_second 48, usage 56, segment 60, tag 64, stack 68, metadata 72, is_small 76 }
pinned! { dormouse_memory_event_t 72: unix_ns 0, address 8, bytes 16, stream 24, scope 32, pool_first 40, pool_second 48, action 56, tag 60, stack 64, metadata 68 }
pinned! { dormouse_frame_t 16: code 0, offset 8, caller 12 }
pinned! { dormouse_plugin_v1_t 24: size 0, abi_version 4, name 8, get_proc 16 }
