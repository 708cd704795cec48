//! The memory that this process's cgroups allow, of version 2 and of version 1.

/// Maximum number of nested cgroups whose limits are read.
const DEPTH_MAX: usize = 32;
/// Version 1 writes about this many bytes for "no limit".
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// Returns the smallest memory limit of this process's cgroups and of those around them, in bytes. `None`
/// without a limit, or if none can be read. `read` returns the contents of a file.
pub(super) fn limit_bytes(read: impl Fn(&str) -> Option<String>) -> Option<u64> {
    let groups = read("/proc/self/cgroup")?;
    let limits = groups.lines().filter_map(|line| {
        // hierarchy:controllers:path
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        match controllers {
            "" => least_of(&read, "/sys/fs/cgroup", path, "memory.max"),
            _ if controllers.split(',').any(|it| it == "memory") => {
                least_of(&read, "/sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
            }
            _ => None,
        }
    });
    limits.min()
}

/// Returns the smallest limit in `file` of the group `path` and its parents. In a container the path may be that
/// outside of it; the root has the container's limit then.
fn least_of(
    read: &impl Fn(&str) -> Option<String>,
    root: &str,
    path: &str,
    file: &str,
) -> Option<u64> {
    let mut least: Option<u64> = None;
    let mut group = path.trim_end_matches('/');
    for _ in 0..DEPTH_MAX {
        let text = read(&format!("{root}{group}/{file}"));
        let limit = text.and_then(|text| text.trim().parse().ok());
        let limit = limit.filter(|bytes| (1..NO_LIMIT_BYTES).contains(bytes));
        least = least.into_iter().chain(limit).min();
        let Some((parent, _)) = group.rsplit_once('/') else { break };
        group = parent;
    }
    least
}

#[cfg(test)]
mod tests {
    use super::limit_bytes;

    fn limit_of(files: &[(&str, &str)]) -> Option<u64> {
        limit_bytes(|path| {
            files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned())
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
}
