//! The file tier: one preallocated, unlinked file, cut into extents, with checked I/O.
//!
//! It knows bytes and offsets, not regions. Every length is checked, every chunk summed on the
//! way out and verified on the way in. A failed write stops the tier taking more (what it holds
//! can still be read); a failed read changes nothing. Any-thread.

mod error;
mod extent;
mod file;
mod rates;
mod storage;
mod transfer;

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod faults;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use error::{IoOperation, NvmeError};
pub use extent::{Extent, Transfer};
pub use file::{Aligned, IoMemory, UNIT_BYTES};
pub use rates::Rates;
pub use storage::{DirectFile, Storage};
pub use transfer::{CHUNK_BYTES, SHORT_ATTEMPTS_MAX, read_chunk, write_chunk};

use std::path::PathBuf;
use std::sync::Arc;

use dormouse_alloc::core::Tlsf;

use crate::sync::{Mutex, lock};

/// Most I/O threads accepted.
pub const IO_THREADS_MAX: usize = 64;
/// Largest file: 2³² − 1 units.
pub const FILE_BYTES_MAX: u64 = u32::MAX as u64 * UNIT_BYTES as u64;

/// Where the file tier is and how large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeConfig {
    /// A directory on a disk. The file in it has no name.
    pub dir: PathBuf,
    /// Its size, taken from the disk at once; whole units are used.
    pub file_bytes: u64,
    /// Threads doing its I/O, 1 to [`IO_THREADS_MAX`].
    pub io_threads: usize,
}

/// Figures of the file tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeUse {
    /// Bytes in extents.
    pub used_bytes: u64,
    /// The most since the last reset.
    pub peak_bytes: u64,
    /// The limit: the file, or less.
    pub budget_bytes: u64,
    /// Why it takes nothing more.
    pub stopped: Option<String>,
    /// Whether the system keeps the file in memory too.
    pub buffered: bool,
}

#[derive(Debug)]
struct Space {
    tlsf: Tlsf,
    used_bytes: u64,
    peak_bytes: u64,
    budget_bytes: u64,
    stopped: Option<String>,
}

/// The file tier.
#[derive(Debug)]
pub struct Nvme {
    storage: Arc<dyn Storage>,
    space: Mutex<Space>,
    checksums: bool,
    rates: Rates,
}

impl Nvme {
    /// Creates the file and measures it.
    ///
    /// # Errors
    /// `Config` for sizes out of range, `IsMemory`, `Setup`, and whatever the measuring met.
    pub fn create(config: &NvmeConfig, checksums: bool) -> Result<Self, NvmeError> {
        check_config(config)?;
        let bytes = config.file_bytes / UNIT_BYTES as u64 * UNIT_BYTES as u64;
        let storage = DirectFile::create(&config.dir, bytes)?;
        let rates = rates::measure(&storage, bytes)?;
        Ok(Self { rates, ..Self::with_storage(Arc::new(storage), bytes, checksums) })
    }

    /// A tier over any storage, unmeasured.
    #[must_use]
    pub fn with_storage(storage: Arc<dyn Storage>, file_bytes: u64, checksums: bool) -> Self {
        let units = u32::try_from(file_bytes / UNIT_BYTES as u64).unwrap_or(u32::MAX);
        let space = Space {
            tlsf: Tlsf::new(units),
            used_bytes: 0,
            peak_bytes: 0,
            budget_bytes: u64::from(units) * UNIT_BYTES as u64,
            stopped: None,
        };
        Self { storage, space: Mutex::new(space), checksums, rates: Rates::default() }
    }

    /// The storage, for transfers.
    #[must_use]
    pub fn storage(&self) -> &dyn Storage {
        &*self.storage
    }

    /// Whether chunks are summed and verified.
    #[must_use]
    pub const fn checksums(&self) -> bool {
        self.checksums
    }

    /// What was measured at creation.
    #[must_use]
    pub const fn rates(&self) -> Rates {
        self.rates
    }

    /// An extent of `bytes`, rounded up to whole units.
    ///
    /// # Errors
    /// `Full`; `Stopped`.
    pub fn allocate(&self, bytes: u64) -> Result<Extent, NvmeError> {
        let mut space = lock(&self.space);
        if let Some(reason) = &space.stopped {
            return Err(NvmeError::Stopped { reason: reason.clone() });
        }
        let full = NvmeError::Full {
            asked_bytes: bytes,
            used_bytes: space.used_bytes,
            budget_bytes: space.budget_bytes,
        };
        let Ok(units) = u32::try_from(bytes.div_ceil(UNIT_BYTES as u64)) else { return Err(full) };
        let whole_bytes = u64::from(units) * UNIT_BYTES as u64;
        if space.used_bytes + whole_bytes > space.budget_bytes {
            return Err(full);
        }
        let Some(piece) = space.tlsf.allocate(units, 1) else { return Err(full) };
        space.used_bytes += whole_bytes;
        space.peak_bytes = space.peak_bytes.max(space.used_bytes);
        Ok(Extent::new(piece, bytes))
    }

    /// Gives an extent back; bytes used after that.
    pub fn release(&self, extent: Extent) -> u64 {
        let mut space = lock(&self.space);
        let bytes = extent.whole_bytes();
        if space.tlsf.free(extent.into_piece()).is_ok() {
            space.used_bytes -= bytes;
        }
        space.used_bytes
    }

    /// Takes nothing more from now on. The first reason stays.
    pub fn stop(&self, reason: &str) {
        let mut space = lock(&self.space);
        if space.stopped.is_none() {
            space.stopped = Some(reason.to_owned());
        }
    }

    /// Sets the limit on bytes used; what is held stays. Never above the file.
    pub fn set_budget(&self, bytes: u64) {
        let mut space = lock(&self.space);
        let file_bytes = u64::from(space.tlsf.units()) * UNIT_BYTES as u64;
        space.budget_bytes = bytes.min(file_bytes);
    }

    /// Figures now.
    #[must_use]
    pub fn usage(&self) -> NvmeUse {
        let space = lock(&self.space);
        NvmeUse {
            used_bytes: space.used_bytes,
            peak_bytes: space.peak_bytes,
            budget_bytes: space.budget_bytes,
            stopped: space.stopped.clone(),
            buffered: self.storage.is_buffered(),
        }
    }

    /// Starts the peak anew.
    pub fn reset_peak(&self) {
        let mut space = lock(&self.space);
        space.peak_bytes = space.used_bytes;
    }
}

fn check_config(config: &NvmeConfig) -> Result<(), NvmeError> {
    if config.file_bytes < UNIT_BYTES as u64 || config.file_bytes > FILE_BYTES_MAX {
        return Err(NvmeError::Config {
            what: "file_bytes",
            seen: config.file_bytes,
            accepted: format!("{UNIT_BYTES} to {FILE_BYTES_MAX}"),
        });
    }
    if config.io_threads == 0 || config.io_threads > IO_THREADS_MAX {
        return Err(NvmeError::Config {
            what: "io_threads",
            seen: config.io_threads as u64,
            accepted: format!("1 to {IO_THREADS_MAX}"),
        });
    }
    Ok(())
}
