//! The memory that this process's cgroups allow, of version 2 and of version 1.
//!
//! The constructor of every preloaded process reads it, so it is plain code over fixed buffers: each part of the
//! library that a small program touches stays resident in it.

use std::ffi::CStr;

/// Maximum number of nested cgroups whose limits are read.
const DEPTH_MAX: usize = 32;
/// Version 1 writes about this many bytes for "no limit".
const NO_LIMIT_BYTES: u64 = 1 << 60;
/// Longest path that is read, with the zero at its end.
const PATH_BYTES_MAX: usize = 4096;
/// Read of the list of groups at most. A line that does not fit is left out.
const GROUPS_BYTES_MAX: usize = 8192;
/// Read of a limit at most: 20 digits and a newline.
const LIMIT_BYTES_MAX: usize = 32;

/// Returns the smallest memory limit of this process's cgroups and of those around them, in bytes. `None`
/// without a limit, or if none can be read. `read` fills a buffer from the file of that path, and returns the number of
/// bytes, or `None` if the file cannot be read.
pub(super) fn limit_bytes(read: impl Fn(&CStr, &mut [u8]) -> Option<usize>) -> Option<u64> {
    let mut buffer = [0; GROUPS_BYTES_MAX];
    let length = read(c"/proc/self/cgroup", &mut buffer)?;
    let whole = if length < buffer.len() {
        length
    } else {
        buffer.iter().rposition(|&byte| byte == b'\n').unwrap_or(0)
    };
    let mut least: Option<u64> = None;
    for line in buffer[..whole].split(|&byte| byte == b'\n') {
        // hierarchy:controllers:path
        let mut fields = line.splitn(3, |&byte| byte == b':');
        let (Some(_), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let limit = if controllers.is_empty() {
            least_of(&read, b"/sys/fs/cgroup", path, b"/memory.max")
        } else if controllers.split(|&byte| byte == b',').any(|name| name == b"memory") {
            least_of(&read, b"/sys/fs/cgroup/memory", path, b"/memory.limit_in_bytes")
        } else {
            None
        };
        least = smaller(least, limit);
    }
    least
}

/// Returns the smallest limit in `file` of the group `path` and its parents. In a container the path may be that
/// outside of it; the root has the container's limit then.
fn least_of(
    read: &impl Fn(&CStr, &mut [u8]) -> Option<usize>,
    root: &[u8],
    path: &[u8],
    file: &[u8],
) -> Option<u64> {
    let mut least = None;
    let mut group = path;
    for _ in 0..DEPTH_MAX {
        while let [parents @ .., b'/'] = group {
            group = parents;
        }
        let mut buffer = [0; PATH_BYTES_MAX];
        if let Some(place) = join(&mut buffer, [root, group, file]) {
            let mut text = [0; LIMIT_BYTES_MAX];
            let length = read(place, &mut text).unwrap_or(0);
            least = smaller(least, number(&text[..length]));
        }
        let Some(slash) = group.iter().rposition(|&byte| byte == b'/') else { break };
        group = &group[..slash];
    }
    least
}

fn smaller(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if one < other { one } else { other }),
        (one, None) => one,
        (None, other) => other,
    }
}

/// Joins `parts` to a path in `buffer`. `None` if it is too long.
fn join<'a>(buffer: &'a mut [u8; PATH_BYTES_MAX], parts: [&[u8]; 3]) -> Option<&'a CStr> {
    let mut length = 0;
    for part in parts {
        let end = length + part.len();
        buffer.get_mut(length..end)?.copy_from_slice(part);
        length = end;
    }
    *buffer.get_mut(length)? = 0;
    CStr::from_bytes_until_nul(buffer).ok()
}

/// Parses a limit: decimal digits and a newline. `None`: no limit.
fn number(text: &[u8]) -> Option<u64> {
    let digits = text.strip_suffix(b"\n").unwrap_or(text);
    let mut value: u64 = 0;
    for byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(byte - b'0'))?;
    }
    (1..NO_LIMIT_BYTES).contains(&value).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::{GROUPS_BYTES_MAX, PATH_BYTES_MAX, limit_bytes};

    fn limit_of(files: &[(&str, &str)]) -> Option<u64> {
        limit_bytes(|path, buffer| {
            let path = path.to_str().unwrap();
            let (_, text) = files.iter().find(|(name, _)| *name == path)?;
            let length = text.len().min(buffer.len());
            buffer[..length].copy_from_slice(&text.as_bytes()[..length]);
            Some(length)
        })
    }

    #[test]
    fn the_smallest_limit_of_the_group_and_its_parents_counts() {
        let groups = ("/proc/self/cgroup", "0::/user.slice/job.scope\n");
        let own = "/sys/fs/cgroup/user.slice/job.scope/memory.max";
        let parent = "/sys/fs/cgroup/user.slice/memory.max";
        assert_eq!(limit_of(&[groups, (own, "max\n"), (parent, "4096\n")]), Some(4096));
        assert_eq!(limit_of(&[groups, (own, "1000\n"), (parent, "4096\n")]), Some(1000));
        assert_eq!(limit_of(&[groups, (own, "max\n"), (parent, "max\n")]), None);
        assert_eq!(limit_of(&[groups]), None);
    }

    #[test]
    fn a_container_sees_its_own_limit_at_the_root() {
        let groups = ("/proc/self/cgroup", "0::/docker/abc\n");
        assert_eq!(limit_of(&[groups, ("/sys/fs/cgroup/memory.max", "77\n")]), Some(77));
        assert_eq!(limit_of(&[("/proc/self/cgroup", "0::/\n")]), None);
        assert_eq!(
            limit_of(&[("/proc/self/cgroup", "0::/\n"), ("/sys/fs/cgroup/memory.max", "5\n")]),
            Some(5)
        );
    }

    #[test]
    fn version_1_is_read_by_its_controller() {
        let groups = ("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n");
        let own = "/sys/fs/cgroup/memory/a/memory.limit_in_bytes";
        assert_eq!(limit_of(&[groups, (own, "8192\n")]), Some(8192));
        assert_eq!(limit_of(&[groups, (own, "9223372036854771712\n")]), None);
    }

    #[test]
    fn damaged_files_are_no_limit() {
        for text in ["", "x", "0::", ":::::", "0::/../..", "4:memory"] {
            assert_eq!(limit_of(&[("/proc/self/cgroup", text)]), None, "{text:?}");
        }
        let groups = ("/proc/self/cgroup", "0::/a");
        for text in ["-1", "0", "1e9", "18446744073709551616"] {
            assert_eq!(limit_of(&[groups, ("/sys/fs/cgroup/a/memory.max", text)]), None);
        }
    }

    #[test]
    fn what_is_longer_than_a_buffer_is_left_out() {
        let limit = ("/sys/fs/cgroup/a/memory.max", "4096\n");
        let long = format!("4:cpu:/{}\n0::/a\n", "x".repeat(GROUPS_BYTES_MAX));
        assert_eq!(limit_of(&[("/proc/self/cgroup", &long), limit]), None);
        let cut = format!("0::/a\n4:cpu:/{}\n", "x".repeat(GROUPS_BYTES_MAX));
        assert_eq!(limit_of(&[("/proc/self/cgroup", &cut), limit]), Some(4096));
        // The path of the group itself is too long; that of its parent is not.
        let deep = format!("0::/a/{}\n", "x".repeat(PATH_BYTES_MAX));
        assert_eq!(limit_of(&[("/proc/self/cgroup", &deep), limit]), Some(4096));
    }
}
