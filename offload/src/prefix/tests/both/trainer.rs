//! A model of a trainer over one prefix.

use dormouse_alloc::Request;
use dormouse_device::Device;
use dormouse_kernels::DType;

use super::bench::TestDevice;
use super::bench::both::Fixture;
use crate::engine::tests::{MIB, fill, holds, peek, poke};
use crate::ids::{RegionId, Tier};
use crate::prefix::{Edge, Phase, Prefix, PrefixReport, Refused, RefusedReason, Tensor};
use dormouse_residency::region::RegionState;

pub(crate) const LABEL: &str = "prefix";
pub(crate) const LAYERS: u32 = 6;
/// What each layer saves: three tensors, one of them the next layer's input.
const SAVED_BYTES: [usize; 3] = [MIB, 512 << 10, 256 << 10];
pub(crate) const LAYER_BYTES: u64 = (MIB + (512 << 10) + (256 << 10)) as u64;
pub(crate) const KEYS: usize = 1024;

/// Address, length and seed of each tensor.
pub(crate) type Saved = Vec<(usize, usize, u64)>;

pub(crate) fn tensor(address: usize, bytes: usize, elems: usize, dtype: DType) -> Tensor {
    Tensor { address, bytes, elems, dtype }
}

/// It works on one stream, which the allocator knows as 0.
pub(crate) struct Trainer<'a> {
    pub(crate) fixture: &'a Fixture,
    pub(crate) stream: <TestDevice as Device>::Stream,
    pub(crate) prefix: Prefix<TestDevice>,
    pub(crate) saved: Vec<Saved>,
    pub(crate) keys: Vec<usize>,
    /// A layer's output is found in the graph of the layer above it, and named no sooner.
    pub(crate) names_late: bool,
}

impl<'a> Trainer<'a> {
    pub(crate) fn new(fixture: &'a Fixture) -> Self {
        Self::of(fixture, LABEL)
    }

    /// Of a prefix with a name of its own.
    pub(crate) fn of(fixture: &'a Fixture, label: &str) -> Self {
        let prefix = fixture.engine.prefix(LAYERS, label).unwrap();
        let (saved, keys) = (Vec::new(), Vec::new());
        Self { fixture, stream: fixture.here(), prefix, saved, keys, names_late: false }
    }

    /// In phase B, with all that is dormant in the file.
    pub(crate) fn in_file(fixture: &'a Fixture) -> Self {
        let mut trainer = Self::new(fixture);
        trainer.forward_all();
        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.settle();
        trainer.to_file();
        trainer.settle();
        trainer
    }

    pub(crate) fn allocate(&self, bytes: usize, scope: u64, seed: u64) -> usize {
        let arena = self.prefix.arena().filter(|_| scope != 0);
        let request = Request { scope, arena, ..Request::new(bytes) };
        let address = self.fixture.allocator.allocate(&request).unwrap().range.start;
        fill(address, bytes, seed);
        address
    }

    /// One layer's forward: it saves three tensors, one key tensor, and frees a scratch.
    pub(crate) fn forward(&mut self, layer: u32) {
        self.prefix.mark(Edge::ForwardBegin, layer, &self.stream).unwrap();
        let scope = self.prefix.scope(layer).unwrap();
        let scratch = self.allocate(MIB, scope, 0);
        let mut saved = Saved::new();
        for (i, bytes) in SAVED_BYTES.into_iter().enumerate() {
            let seed = u64::from(layer) * 10 + i as u64;
            saved.push((self.allocate(bytes, scope, seed), bytes, seed));
        }
        let key = self.allocate(KEYS * 4, scope, 1000 + u64::from(layer));
        self.prefix
            .boundary(layer, 0, tensor(key, KEYS * 4, KEYS, DType::F32), &self.stream)
            .unwrap();
        self.fixture.engine.free(scratch, 0).unwrap();

        let mut named: Vec<usize> = saved.iter().map(|s| s.0 + 8).collect();
        if self.names_late {
            named.remove(0);
            let below = self.saved.last().map(|below| (layer - 1, below[0].0));
            let below = below.map(|(below, input)| self.prefix.dormant(below, &[input]).unwrap());
            assert!(below.is_none_or(|below| below.accepted == 1));
        }
        let count = named.len() as u32;
        named.push(key);
        named.push(named[0]); // the same block twice
        let result = self.prefix.dormant(layer, &named).unwrap();
        assert_eq!(result.accepted, count);
        let boundary = Refused { address: key, reason: RefusedReason::Boundary };
        assert_eq!(result.refused, [boundary]);
        self.prefix.mark(Edge::ForwardEnd, layer, &self.stream).unwrap();
        self.saved.push(saved);
        self.keys.push(key);
    }

    /// A trainer in phase B, all that is dormant asleep.
    pub(crate) fn asleep_in_phase_b(fixture: &'a Fixture) -> Self {
        let mut trainer = Self::new(fixture);
        trainer.forward_all();
        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.settle();
        assert!((0..LAYERS).all(|layer| trainer.states(layer).iter().all(|s| s.is_asleep())));
        trainer
    }

    pub(crate) fn forward_all(&mut self) {
        self.prefix.enter(Phase::A, &self.stream).unwrap();
        for layer in 0..LAYERS {
            self.forward(layer);
        }
    }

    pub(crate) fn ids(&self, layer: u32) -> Vec<RegionId> {
        self.prefix.layers[layer as usize].regions.clone()
    }

    pub(crate) fn states(&self, layer: u32) -> Vec<RegionState> {
        self.ids(layer).iter().map(|&id| self.fixture.state(id)).collect()
    }

    pub(crate) fn settle(&self) {
        for layer in 0..LAYERS {
            self.fixture.engine.wait_settled(&self.ids(layer)).unwrap();
        }
    }

    /// Has everything that sleeps on its way to the file, wherever it sleeps.
    pub(crate) fn to_file(&self) {
        let ids: Vec<_> = (0..LAYERS).flat_map(|layer| self.ids(layer)).collect();
        self.fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    }

    pub(crate) fn microbatch(&mut self) {
        (0..LAYERS).for_each(|layer| self.gradient(layer));
    }

    /// One microbatch's gradient of a layer's keys.
    pub(crate) fn gradient(&mut self, layer: u32) {
        let gradient = self.allocate(KEYS * 4, 0, 0);
        for i in 0..KEYS {
            let one = (1.0_f32.to_bits(), 2.0_f32.to_bits());
            if i % 2 == 0 {
                poke(gradient + i * 4, u64::from(one.0) | u64::from(one.1) << 32);
            }
        }
        assert!(holds(self.keys[layer as usize], KEYS * 4, 1000 + u64::from(layer)));
        // SAFETY: a live block of that many elements, with no other user.
        #[expect(unsafe_code, reason = "the trainer lends memory by address")]
        unsafe {
            self.prefix.accumulate(layer, 0, gradient, KEYS, DType::F32, &self.stream).unwrap();
        }
        self.fixture.engine.free(gradient, 0).unwrap();
    }

    /// Asserts that every gradient is `microbatches` times what one microbatch adds.
    pub(crate) fn assert_sums(&self, microbatches: f32) {
        for layer in 0..LAYERS {
            let sum = self.prefix.gradient(layer, 0).unwrap();
            let (low, high) = (microbatches.to_bits(), (2.0 * microbatches).to_bits());
            assert_eq!(peek(sum), u64::from(low) | u64::from(high) << 32);
        }
    }

    pub(crate) fn intact(&self, layer: u32) -> bool {
        self.saved[layer as usize].iter().all(|&(at, bytes, seed)| holds(at, bytes, seed))
    }

    /// One layer's backward: reads what it saved and its input, frees all but one tensor.
    pub(crate) fn backward(&mut self, layer: u32) {
        self.prefix.mark(Edge::BackwardBegin, layer, &self.stream).unwrap();
        self.fixture.finish(&self.stream);
        assert!(self.intact(layer), "layer {layer}");
        if let Some(below) = layer.checked_sub(1) {
            assert!(self.intact(below), "input of layer {layer}");
        }
        for (address, ..) in self.saved[layer as usize].drain(1..) {
            self.fixture.engine.free(address, 0).unwrap();
        }
        self.prefix.mark(Edge::BackwardEnd, layer, &self.stream).unwrap();
        assert!(self.intact(layer), "what remains stays awake");
    }

    /// Runs phase C, and ends ([`Trainer::end`]).
    pub(crate) fn backward_all_and_end(mut self) -> PrefixReport {
        self.prefix.enter(Phase::C, &self.stream).unwrap();
        (0..LAYERS).rev().for_each(|layer| self.backward(layer));
        self.end()
    }

    /// Ends the trainer's own life: everything it still has is freed.
    pub(crate) fn end(mut self) -> PrefixReport {
        let stalls = self.prefix.report().layer;
        let report = self.prefix.close();
        assert_eq!(report.layer, stalls, "all was known");
        for (address, ..) in self.saved.into_iter().flatten() {
            self.fixture.engine.free(address, 0).unwrap();
        }
        for key in self.keys {
            self.fixture.engine.free(key, 0).unwrap();
        }
        self.fixture.assert_empty();
        report
    }
}

/// Frees what a closed prefix gave back, every byte of it there.
pub(crate) fn free_whole(fixture: &Fixture, saved: Vec<Saved>, keys: Vec<usize>) {
    for (address, bytes, seed) in saved.into_iter().flatten() {
        assert!(holds(address, bytes, seed));
        fixture.engine.free(address, 0).unwrap();
    }
    for key in keys {
        fixture.engine.free(key, 0).unwrap();
    }
}
