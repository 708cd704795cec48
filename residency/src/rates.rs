//! How fast each direction of each link carries bytes.

/// Link bandwidths in bytes per second; 0 where there is no such link or it was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkRates {
    /// Device pages to the file.
    pub device_to_nvme_bytes_per_s: u64,
    /// The file to device pages.
    pub nvme_to_device_bytes_per_s: u64,
    /// Device pages to pinned host memory.
    pub device_to_host_bytes_per_s: u64,
    /// Pinned host memory to device pages.
    pub host_to_device_bytes_per_s: u64,
}
