//! Boundary tensors: what suffixes read, and the sums of its gradients.

use dormouse_alloc::Request;
use dormouse_device::{Device, Fill};
use dormouse_kernels::{DType, KernelError};

use super::Prefix;
use crate::compute::Compute;
use crate::engine::raw_memory;
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, label};

/// Most boundary tensors of a prefix.
pub const SLOTS_MAX: usize = 1 << 16;
/// Alignment of accumulators, in bytes: a cache line, and the widest vector register.
const ACCUMULATOR_ALIGN_BYTES: usize = 64;

/// A tensor where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// First byte.
    pub address: usize,
    /// Bytes that are its storage's from there.
    pub bytes: usize,
    /// Elements, dense.
    pub elems: usize,
    /// Of this type.
    pub dtype: DType,
}

/// One boundary tensor.
#[derive(Debug)]
pub(super) struct BoundarySlot {
    /// Its own region; `None` where the memory is not ours, or shares another slot's block.
    region: Option<RegionId>,
    pub(super) bytes: u64,
    elems: usize,
    dtype: DType,
    accumulator: Accumulator,
}

#[derive(Debug)]
struct Accumulator {
    region: RegionId,
    address: usize,
    bytes: u64,
    /// The stream it was allocated for.
    stream_key: u64,
}

impl<D: Device> Prefix<D> {
    /// Declares a boundary tensor: its block never sleeps from here on, and it has a zeroed accumulator (FP32; FP64 for FP64), zero from this
    /// point of `stream` on.
    ///
    /// # Errors
    /// `Argument`: layer, no elements, more than fit in `bytes`, a slot used before; `NotAwake`
    /// where the block sleeps already; `Alloc` where there is no room for the accumulator.
    pub fn boundary(
        &mut self,
        layer: u32,
        slot: u32,
        tensor: Tensor,
        stream: &D::Stream,
    ) -> Result<(), OffloadError> {
        let Tensor { address, bytes, elems, dtype } = tensor;
        self.order.check_layer(layer)?;
        let fits = elems.checked_mul(dtype.size_bytes()).is_some_and(|n| n <= bytes);
        if elems == 0 || !fits {
            let accepted = format!("1 to {}", bytes / dtype.size_bytes());
            return Err(OffloadError::argument("boundary elements", elems, accepted));
        }
        if self.slots.contains_key(&(layer, slot)) {
            let seen = format!("{slot} of layer {layer} again");
            return Err(OffloadError::argument("boundary slot", seen, "one not used before"));
        }
        if self.slots.len() >= SLOTS_MAX {
            return Err(OffloadError::TooMany {
                what: "boundary tensors",
                limit: SLOTS_MAX as u64,
            });
        }
        let region = self.keep_awake(layer, address, stream)?;
        let accumulator = match self.make_accumulator(layer, elems, dtype, stream) {
            Ok(accumulator) => accumulator,
            Err(e) => {
                if let Some(region) = region {
                    self.engine.release(region)?;
                }
                return Err(e);
            }
        };
        let slot_of = BoundarySlot { region, bytes: bytes as u64, elems, dtype, accumulator };
        self.slots.insert((layer, slot), slot_of);
        Ok(())
    }

    /// Makes sure that the block around `address` never sleeps.
    fn keep_awake(
        &mut self,
        layer: u32,
        address: usize,
        stream: &D::Stream,
    ) -> Result<Option<RegionId>, OffloadError> {
        if self.engine.allocator().lookup(address).is_none() {
            return Ok(None); // not managed by us: nothing of it ever sleeps
        }
        let Some(known) = self.engine.region_at(address) else {
            let label = label(&self.label, Some(layer));
            return self.engine.adopt(address, Role::Boundary, label).map(Some);
        };
        // Named dormant before (by this or another layer), or part of another boundary's block.
        let info = self.engine.region_info(known)?;
        match info.role {
            Role::Boundary | Role::BoundaryGrad => Ok(None),
            Role::Dormant | Role::Tagged => {
                let holder = self.layers.iter().position(|l| l.regions.contains(&known));
                let Some(holder) = holder else {
                    let owner = known.to_string();
                    return Err(OffloadError::Claimed { address: info.range.start, owner });
                };
                self.engine.forbid_reclaim(&[known]);
                self.wait(|engine| engine.wait_awake_on(&[known], stream))?;
                // The layer's until here: what cannot be woken is its to wake, and to give back.
                // Or it was written to as others fell asleep, and is its owner's alone.
                let has_left = self.engine.region_at(address) != Some(known);
                if has_left || self.engine.has_several_blocks(known) {
                    if !has_left {
                        // Those it would have slept with stay awake too.
                        self.engine.release(known)?;
                        self.disown(holder, known, info.bytes);
                    }
                    let label = label(&self.label, Some(layer));
                    return self.engine.adopt(address, Role::Boundary, label).map(Some);
                }
                self.engine.set_role(known, Role::Boundary)?;
                self.disown(holder, known, info.bytes);
                Ok(Some(known))
            }
        }
    }

    /// A region is dormant in a layer no longer.
    fn disown(&mut self, layer: usize, region: RegionId, bytes: u64) {
        let Some(found) = self.layers.get_mut(layer) else { return };
        found.regions.retain(|&it| it != region);
        found.report.dormant_bytes = found.report.dormant_bytes.saturating_sub(bytes);
        self.held_bytes = self.held_bytes.saturating_sub(bytes);
    }

    fn make_accumulator(
        &self,
        layer: u32,
        elems: usize,
        dtype: DType,
        stream: &D::Stream,
    ) -> Result<Accumulator, OffloadError> {
        let bytes = elems
            .checked_mul(dtype.accumulator().size_bytes())
            .ok_or_else(|| OffloadError::argument("boundary elements", elems, "fewer"))?;
        let allocator = self.engine.allocator();
        // Not that of the tensor it belongs to, which may be another's, and another allocator's.
        let stream_key = allocator.key_of(stream).unwrap_or_default();
        let request = Request {
            align: ACCUMULATOR_ALIGN_BYTES,
            fill: Fill::Zero,
            stream: stream_key,
            ..Request::new(bytes)
        };
        let block = allocator.allocate(&request)?;
        let address = block.range.start;
        let zeroed = if block.zeroed {
            Ok(())
        } else {
            raw_memory::zero(&**allocator.device(), address, bytes, stream)
        };
        let label = label(&self.label, Some(layer));
        let adopted = zeroed
            .map_err(OffloadError::from)
            .and_then(|()| self.engine.adopt(address, Role::BoundaryGrad, label));
        match adopted {
            Ok(region) => Ok(Accumulator { region, address, bytes: bytes as u64, stream_key }),
            Err(e) => {
                self.engine.free(address, stream_key)?;
                Err(e)
            }
        }
    }

    /// Adds `elems` elements at `grad_address` into the slot's accumulator, in stream order.
    ///
    /// # Errors
    /// `Argument`: a slot never declared, another number of elements; `Kernel`; `Alloc`.
    ///
    /// # Safety
    /// `grad_address` is aligned for `dtype` and readable for `elems` elements until the stream has
    /// passed this (on the host's: until it returns), and nobody else writes to the accumulator
    /// meanwhile.
    #[expect(unsafe_code, reason = "the caller lends memory by address")]
    pub unsafe fn accumulate(
        &mut self,
        layer: u32,
        slot: u32,
        grad_address: usize,
        elems: usize,
        dtype: DType,
        stream: &D::Stream,
    ) -> Result<(), OffloadError>
    where
        D: Compute,
    {
        let found = self.slot(layer, slot)?;
        if elems != found.elems {
            return Err(OffloadError::argument("gradient elements", elems, found.elems));
        }
        let accumulator = found.dtype.accumulator();
        if dtype.accumulator() != accumulator {
            return Err(KernelError::Types { source_type: dtype, accumulator }.into());
        }
        let allocator = self.engine.allocator();
        let sums = found.accumulator.address;
        if let Some(key) = allocator.key_of(stream) {
            allocator.record_stream(sums, key)?;
        }
        let device = allocator.device();
        // SAFETY: the accumulator is a live block of ours, large enough for its slot's elements,
        // whose number was compared; the rest is the caller's.
        unsafe { device.accumulate(sums, grad_address, elems, dtype, stream) }?;
        self.sample();
        self.gradient_arrived(stream);
        Ok(())
    }

    /// Where the slot's accumulator is, until the prefix is closed. The trainer may add in place.
    ///
    /// # Errors
    /// `Argument`: a slot never declared.
    pub fn gradient(&self, layer: u32, slot: u32) -> Result<usize, OffloadError> {
        Ok(self.slot(layer, slot)?.accumulator.address)
    }

    fn slot(&self, layer: u32, slot: u32) -> Result<&BoundarySlot, OffloadError> {
        self.order.check_layer(layer)?;
        self.slots.get(&(layer, slot)).ok_or_else(|| {
            let seen = format!("{slot} of layer {layer}");
            OffloadError::argument("boundary slot", seen, "one declared with `boundary`")
        })
    }

    /// Bytes of boundary tensors and of their accumulators.
    pub(super) fn boundary_bytes(&self) -> (u64, u64) {
        let sum = |f: fn(&BoundarySlot) -> u64| self.slots.values().map(f).sum();
        (sum(|s| s.bytes), sum(|s| s.accumulator.bytes))
    }

    /// Gives boundary tensors back and frees the accumulators.
    pub(super) fn drop_slots(&mut self) {
        for slot in std::mem::take(&mut self.slots).into_values() {
            if let Some(region) = slot.region {
                // Stale where its owner has freed it already.
                let _ = self.engine.release(region);
            }
            let _ = self.engine.release(slot.accumulator.region);
            let _ = self.engine.free(slot.accumulator.address, slot.accumulator.stream_key);
        }
    }
}
