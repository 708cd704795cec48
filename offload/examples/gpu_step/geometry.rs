//! What the simulated step allocates, and how long it takes: 32 responses of 2,048 tokens to a prompt of 10,240, on
//! Llama-3-8B's geometry. Sizes and seconds are those of `python -m dormouse.headline arithmetic`.

pub(crate) const MIB: usize = 1 << 20;
const KIB: usize = 1 << 10;

pub(crate) const LAYERS: usize = 32;
pub(crate) const PROMPT_TOKENS: usize = 10_240;
pub(crate) const RESPONSE_TOKENS: usize = 2_048;
/// Responses of a microbatch.
pub(crate) const RESPONSES: usize = 2;
pub(crate) const MICROBATCH_TOKENS: usize = RESPONSES * RESPONSE_TOKENS;
pub(crate) const MICROBATCHES: usize = 16;

/// KiB per token of the tensors that a layer saves, K and V apart: the first norm, the rotated query, the attention's
/// output, the second norm, the MLP. See `docs/evidence/gpu.md`.
const SAVED_KIB: [usize; 12] = [16, 8, 8, 8, 8, 16, 8, 8, 28, 28, 28, 28];
/// Tensors that a layer saves. Each has a kernel of its own.
pub(crate) const SAVED: usize = SAVED_KIB.len();
/// Place of the attention's output among them. K and V are there before it.
pub(crate) const ATTENTION: usize = 4;
/// Of the prompt's last layer, K and V alone are read: what follows its first norm is freed when the forward ends.
pub(crate) const SAVED_OF_LAST: usize = 3;

/// K and V of a layer, BF16: bytes of each for the prompt. Their gradients in phase C are as large.
pub(crate) const KEYS_BYTES: usize = 2 * KIB * PROMPT_TOKENS;
/// Their accumulators, FP32.
pub(crate) const ACCUMULATOR_BYTES: usize = 2 * KEYS_BYTES;
/// Boundary tensors of a layer: K and V.
pub(crate) const BOUNDARY: usize = 2;

const VOCAB: usize = 128_256;
/// Logits of one response, BF16 and FP32.
pub(crate) const LOGITS_BYTES: usize = 2 * VOCAB * RESPONSE_TOKENS;
pub(crate) const WIDE_LOGITS_BYTES: usize = 2 * LOGITS_BYTES;

/// Weights of a layer, BF16, without its norms: queries, keys, values, output, gate, up and down.
const WEIGHTS_MIB: [usize; 7] = [32, 8, 8, 32, 112, 112, 112];
/// The embedding and the head.
const EMBEDDING_BYTES: usize = 2 * VOCAB * 4_096;

/// Kernels of the head and the loss of a microbatch: one for each tensor.
pub(crate) const HEAD_TENSORS: u64 = 1 + 4 * RESPONSES as u64;

pub(crate) const A_NS: u64 = 280_000_000;
const B_NS: u64 = 7_100_000_000;
pub(crate) const C_NS: u64 = 580_000_000;
/// The head of a microbatch, forward and backward: 12.9 TFLOP of products at 620 TFLOP/s, a part of `B_NS`.
pub(crate) const HEAD_NS: u64 = 20_800_000;
/// A layer of a microbatch, forward and backward.
const LAYER_NS: u64 = (B_NS / MICROBATCHES as u64 - HEAD_NS) / LAYERS as u64;
/// A backward takes twice as long as its forward.
pub(crate) const FORWARD_NS: u64 = LAYER_NS / 3;
pub(crate) const BACKWARD_NS: u64 = LAYER_NS - FORWARD_NS;
/// Bytes per ns of the link, each way.
pub(crate) const LINK: u64 = 55;

/// Returns the bytes of the tensors that a layer saves of these tokens, in the order of its forward.
pub(crate) fn saved_bytes(tokens: usize) -> [usize; SAVED] {
    SAVED_KIB.map(|kib| kib * KIB * tokens)
}

/// Returns the bytes of each parameter, and of its gradient.
pub(crate) fn parameter_bytes() -> impl Iterator<Item = usize> {
    let layers = (0..LAYERS).flat_map(|_| WEIGHTS_MIB.map(|mib| mib * MIB));
    let parameters = layers.chain([EMBEDDING_BYTES; 2]);
    parameters.flat_map(|bytes| [bytes; 2])
}
