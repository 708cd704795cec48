//! Boundary tensors, which suffixes read, and their gradient accumulators.

use dormouse_alloc::Request;
use dormouse_device::{Device, Fill};
use dormouse_kernels::{DType, KernelError};
use dormouse_timeline::Lane;

use super::Prefix;
use crate::compute::Compute;
use crate::engine::raw_memory;
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, label};

/// Limit on boundary tensors per prefix.
pub const SLOTS_MAX: usize = 1 << 16;
/// Alignment of accumulators, in bytes: a cache line, and the widest vector register.
const ACCUMULATOR_ALIGN_BYTES: usize = 64;

/// A tensor by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Address of its first byte.
    pub address: usize,
    /// Bytes of its storage from there.
    pub bytes: usize,
    /// Number of contiguous elements.
    pub elems: usize,
    /// Element type.
    pub dtype: DType,
}

/// One boundary tensor.
#[derive(Debug)]
pub(super) struct BoundarySlot {
    /// Its own region; `None` for memory of another allocator, or if another slot's block has it.
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
    /// Declares a boundary tensor: its block never sleeps from now on. Allocates its accumulator (FP64 for an
    /// FP64 tensor, otherwise FP32), which is zero from this point of `stream` on.
    ///
    /// # Errors
    /// `Argument` for the layer, no elements, more than fit in `bytes`, or a slot used before; `NotAwake` if
    /// the block sleeps already; `Alloc` if there is no room for the accumulator.
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

    /// Keeps the block around `address` awake from now on.
    fn keep_awake(
        &mut self,
        layer: u32,
        address: usize,
        stream: &D::Stream,
    ) -> Result<Option<RegionId>, OffloadError> {
        if self.engine.allocator().lookup(address).is_none() {
            return Ok(None); // memory of another allocator never sleeps
        }
        let Some(known) = self.engine.region_at(address) else {
            let label = label(&self.label, Some(layer));
            return self.engine.adopt(address, Role::Boundary, label).map(Some);
        };
        // Named dormant by this or another layer, or part of the block of another boundary tensor.
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
                // Until here it belongs to the layer, which releases it if this wait fails. A block that was
                // written to while the others fell asleep has left the region.
                let has_left = self.engine.region_at(address) != Some(known);
                if has_left || self.engine.has_several_blocks(known) {
                    if !has_left {
                        // The other blocks of the region stay awake too.
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

    /// Removes a region from the dormant ones of a layer.
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
        // Not the stream of the tensor, which may be memory of another allocator.
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
    /// `Argument` for a slot that was not declared or another number of elements; `Kernel`; `Alloc`.
    ///
    /// # Safety
    /// `grad_address` is aligned for `dtype` and readable for `elems` elements until the stream has passed
    /// this call (on the host device: until it returns), and nothing else writes to the accumulator meanwhile.
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
        // SAFETY: the accumulator is a live block of this allocator with room for the slot's elements, whose
        // number was compared; the caller's contract covers the gradient.
        unsafe { device.accumulate(sums, grad_address, elems, dtype, stream) }?;
        self.record_begin(Lane::Layer, "gradient", layer);
        self.sample();
        self.gradient_arrived(stream);
        Ok(())
    }

    /// Returns the address of the slot's accumulator, valid until the prefix is closed. The trainer may add to
    /// it in place.
    ///
    /// # Errors
    /// `Argument` for a slot that was not declared.
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

    /// Returns the bytes of boundary tensors and of their accumulators.
    pub(super) fn boundary_bytes(&self) -> (u64, u64) {
        let sum = |f: fn(&BoundarySlot) -> u64| self.slots.values().map(f).sum();
        (sum(|s| s.bytes), sum(|s| s.accumulator.bytes))
    }

    /// Releases the boundary tensors and frees the accumulators.
    pub(super) fn drop_slots(&mut self) {
        for slot in std::mem::take(&mut self.slots).into_values() {
            if let Some(region) = slot.region {
                // Stale if its owner has freed it.
                let _ = self.engine.release(region);
            }
            let _ = self.engine.release(slot.accumulator.region);
            let _ = self.engine.free(slot.accumulator.address, slot.accumulator.stream_key);
        }
    }
}
