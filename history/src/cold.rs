//! The file of prompts that memory has no room for: extents of the NVMe tier's file, with its checksums.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use dormouse_storage::{Aligned, CHUNK_BYTES, DirectFile, Extent, Nvme, NvmeError};

/// `ENOMEM`.
const OUT_OF_MEMORY: i32 = 12;

/// The file. One caller at a time.
#[derive(Debug)]
pub(crate) struct Cold {
    nvme: Nvme,
}

/// A prompt in the file.
#[derive(Debug)]
pub(crate) struct ColdPrompt {
    extent: Extent,
    bytes: usize,
}

impl Cold {
    /// Makes a file of `file_bytes` without a name in `dir`, with its space reserved.
    pub(crate) fn create(dir: &Path, file_bytes: u64) -> Result<Self, NvmeError> {
        let file = Arc::new(DirectFile::create(dir, file_bytes)?);
        Ok(Self::over(Nvme::with_storage(file, file_bytes, true)))
    }

    pub(crate) const fn over(nvme: Nvme) -> Self {
        Self { nvme }
    }

    /// Writes a prompt.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<ColdPrompt, NvmeError> {
        let mut extent = self.nvme.allocate(bytes.len() as u64)?;
        match self.write(&mut extent, bytes) {
            Ok(sums) => {
                extent.set_sums(sums);
                Ok(ColdPrompt { extent, bytes: bytes.len() })
            }
            Err(e) => {
                self.nvme.release(extent);
                Err(e)
            }
        }
    }

    /// Reads a prompt. It stays in the file.
    pub(crate) fn get(&mut self, prompt: &ColdPrompt) -> Result<Vec<u8>, NvmeError> {
        let mut bytes = Vec::with_capacity(prompt.bytes);
        while bytes.len() < prompt.bytes {
            let left = (prompt.bytes - bytes.len()).min(CHUNK_BYTES);
            let mut buffer = buffer(left)?;
            self.nvme.read_chunk(&prompt.extent, bytes.len() as u64, buffer.memory())?;
            bytes.extend_from_slice(buffer.as_slice().get(..left).unwrap_or_default());
        }
        Ok(bytes)
    }

    /// Releases a prompt's place.
    pub(crate) fn remove(&mut self, prompt: ColdPrompt) {
        self.nvme.release(prompt.extent);
    }

    /// Returns the bytes in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.nvme.usage().used_bytes
    }

    fn write(&self, extent: &mut Extent, bytes: &[u8]) -> Result<Vec<u32>, NvmeError> {
        let mut sums = Vec::new();
        for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
            let mut buffer = buffer(chunk.len())?;
            if let Some(place) = buffer.as_mut_slice().get_mut(..chunk.len()) {
                place.copy_from_slice(chunk);
            }
            let at = (index * CHUNK_BYTES) as u64;
            sums.extend(self.nvme.write_chunk(extent, at, buffer.memory())?);
        }
        Ok(sums)
    }
}

fn buffer(bytes: usize) -> Result<Aligned, NvmeError> {
    Aligned::zeroed(bytes).ok_or_else(|| NvmeError::Setup {
        dir: PathBuf::new(),
        what: "a buffer",
        reason: format!("no memory for {bytes} bytes"),
        code: OUT_OF_MEMORY,
    })
}
