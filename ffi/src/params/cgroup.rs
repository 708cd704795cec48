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

/// Read of a group's statistics at most.
const STAT_BYTES_MAX: usize = 8192;

/// Fills a buffer from the file of that path, and returns the number of bytes, or `None` if the file cannot be read.
pub(super) trait Read: Fn(&CStr, &mut [u8]) -> Option<usize> {}

impl<F: Fn(&CStr, &mut [u8]) -> Option<usize>> Read for F {}

/// The files of a version.
struct Version {
    root: &'static [u8],
    limit: &'static [u8],
    usage: &'static [u8],
    /// Lines of `memory.stat` with bytes of files, which the kernel drops if memory is short.
    files: [&'static [u8]; 2],
}

const V1: Version = Version {
    root: b"/sys/fs/cgroup/memory",
    limit: b"/memory.limit_in_bytes",
    usage: b"/memory.usage_in_bytes",
    files: [b"total_inactive_file", b"total_active_file"],
};
const V2: Version = Version {
    root: b"/sys/fs/cgroup",
    limit: b"/memory.max",
    usage: b"/memory.current",
    files: [b"inactive_file", b"active_file"],
};

/// Returns the smallest memory limit of this process's cgroups and of those around them, in bytes. `None`
/// without a limit, or if none can be read.
pub(super) fn limit_bytes(read: impl Read) -> Option<u64> {
    least(&read, |version, group| limit_of(&read, version, group))
}

/// Returns the bytes that this process's cgroups and those around them still allow; the memory of files counts as
/// free. `None` without a limit, or if none can be read.
pub(super) fn available_bytes(read: impl Read) -> Option<u64> {
    least(&read, |version, group| {
        let limit_bytes = limit_of(&read, version, group)?;
        let used_bytes = figure(&read, [version.root, group, version.usage])?;
        let mut text = [0; STAT_BYTES_MAX];
        let stat = file(&read, [version.root, group, b"/memory.stat"], &mut text).unwrap_or(&[]);
        let of_files = version.files.map(|name| line_of(stat, name).unwrap_or(0));
        let files_bytes = of_files.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        Some(limit_bytes.saturating_sub(used_bytes.saturating_sub(files_bytes)))
    })
}

/// Returns the least figure of this process's groups and of those around them.
fn least(read: &impl Read, of: impl Fn(&Version, &[u8]) -> Option<u64>) -> Option<u64> {
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
        let version = if controllers.is_empty() {
            &V2
        } else if controllers.split(|&byte| byte == b',').any(|name| name == b"memory") {
            &V1
        } else {
            continue;
        };
        least = smaller(least, least_around(path, |group| of(version, group)));
    }
    least
}

/// Returns the least figure of the group `path` and its parents. In a container the path may be that outside of it;
/// the root has the container's figures then.
fn least_around(path: &[u8], of: impl Fn(&[u8]) -> Option<u64>) -> Option<u64> {
    let mut least = None;
    let mut group = path;
    for _ in 0..DEPTH_MAX {
        while let [parents @ .., b'/'] = group {
            group = parents;
        }
        least = smaller(least, of(group));
        let Some(slash) = group.iter().rposition(|&byte| byte == b'/') else { break };
        group = &group[..slash];
    }
    least
}

fn limit_of(read: &impl Read, version: &Version, group: &[u8]) -> Option<u64> {
    figure(read, [version.root, group, version.limit]).filter(|it| (1..NO_LIMIT_BYTES).contains(it))
}

/// Returns the number in the file whose path is `parts`. `None` for another text, such as `max`.
fn figure(read: &impl Read, parts: [&[u8]; 3]) -> Option<u64> {
    let mut text = [0; LIMIT_BYTES_MAX];
    number(file(read, parts, &mut text)?)
}

/// Reads the file whose path is `parts`.
fn file<'a>(read: &impl Read, parts: [&[u8]; 3], text: &'a mut [u8]) -> Option<&'a [u8]> {
    let mut buffer = [0; PATH_BYTES_MAX];
    let length = read(join(&mut buffer, parts)?, text)?;
    text.get(..length)
}

/// Returns the number behind `name` in lines of a name and a number.
fn line_of(text: &[u8], name: &[u8]) -> Option<u64> {
    let mut lines = text.split(|&byte| byte == b'\n');
    let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(b" "))?;
    number(line)
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

/// Parses decimal digits and a newline.
fn number(text: &[u8]) -> Option<u64> {
    let digits = text.strip_suffix(b"\n").unwrap_or(text);
    if digits.is_empty() {
        return None;
    }
    let mut value: u64 = 0;
    for byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(byte - b'0'))?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::{GROUPS_BYTES_MAX, PATH_BYTES_MAX, Read, available_bytes, limit_bytes};

    fn reader(files: &[(&str, &str)]) -> impl Read {
        |path: &std::ffi::CStr, buffer: &mut [u8]| {
            let path = path.to_str().unwrap();
            let (_, text) = files.iter().find(|(name, _)| *name == path)?;
            let length = text.len().min(buffer.len());
            buffer[..length].copy_from_slice(&text.as_bytes()[..length]);
            Some(length)
        }
    }

    fn limit_of(files: &[(&str, &str)]) -> Option<u64> {
        limit_bytes(reader(files))
    }

    #[test]
    fn what_files_use_is_available() {
        let groups = ("/proc/self/cgroup", "0::/job\n");
        let limit = ("/sys/fs/cgroup/job/memory.max", "1000\n");
        let usage = ("/sys/fs/cgroup/job/memory.current", "900\n");
        let stat =
            ("/sys/fs/cgroup/job/memory.stat", "anon 500\ninactive_file 300\nactive_file 50\n");
        assert_eq!(available_bytes(reader(&[groups, limit, usage, stat])), Some(450));
        assert_eq!(available_bytes(reader(&[groups, limit, usage])), Some(100));
        assert_eq!(available_bytes(reader(&[groups, limit])), None, "the usage is not known");
        let root = ("/sys/fs/cgroup/memory.max", "max\n");
        assert_eq!(available_bytes(reader(&[groups, root, usage])), None, "no limit");
        let (above, used) =
            (("/sys/fs/cgroup/memory.max", "2000\n"), ("/sys/fs/cgroup/memory.current", "1990\n"));
        assert_eq!(available_bytes(reader(&[groups, limit, usage, stat, above, used])), Some(10));
        let version_1 = [
            ("/proc/self/cgroup", "4:memory:/a\n"),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n"),
            ("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "900\n"),
            ("/sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 20\n"),
        ];
        assert_eq!(available_bytes(reader(&version_1)), Some(120));
        let over = [groups, ("/sys/fs/cgroup/job/memory.max", "5\n"), usage];
        assert_eq!(available_bytes(reader(&over)), Some(0));
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
