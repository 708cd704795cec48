//! Limits of the system on memory, mappings and files.

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_parallel::draw::bytes;

use super::Check;
use super::library::Settings;
use crate::text::count;

/// Mappings of a process below which a large model may run out: each block that sleeps alone has one or two.
const MAP_COUNT_MIN: u64 = 65_530;
/// Locked bytes below which io_uring cannot register the buffers of the I/O threads.
const LOCKED_BYTES_MIN: u64 = 64 << 20;
/// Open files below which a trainer with data loaders may run out.
const FILES_MIN: u64 = 1024;
/// Maximum directories above a control group.
const GROUPS_MAX: usize = 32;

pub(super) fn checks(settings: &Settings) -> Vec<Check> {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let mut checks = vec![
        address_space(limit(&limits, "Max address space"), settings),
        locked(limit(&limits, "Max locked memory")),
        files(limit(&limits, "Max open files")),
    ];
    checks.extend(number("/proc/sys/vm/max_map_count").map(map_count));
    checks.extend(number("/proc/sys/vm/overcommit_memory").map(overcommit));
    let group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group_of(&text));
    checks
        .push(group_memory(group.and_then(|path| memory_max(Path::new("/sys/fs/cgroup"), &path))));
    checks.push(shared_memory(Path::new("/dev/shm")));
    checks
}

/// The soft limit of a line of `/proc/self/limits`; `None` if unlimited.
fn limit(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

fn number(file: &str) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn address_space(limit: Option<u64>, settings: &Settings) -> Check {
    const WHAT: &str = "address space";
    const RESERVE: &str = "DORMOUSE_HEAP_RESERVE_BYTES";
    let Some(limit) = limit else { return Check::ok(WHAT, "unlimited") };
    let reserve = settings.number(RESERVE).unwrap_or(0);
    let seen = format!("ulimit -v is {}, {RESERVE} is {}", bytes(limit), bytes(reserve));
    match limit > reserve {
        true => Check::ok(WHAT, seen),
        false => Check::broken(WHAT, seen, format!("ulimit -v unlimited, or a smaller {RESERVE}")),
    }
}

fn locked(limit: Option<u64>) -> Check {
    const WHAT: &str = "locked memory";
    match limit {
        None => Check::ok(WHAT, "unlimited"),
        Some(limit) if limit >= LOCKED_BYTES_MIN => Check::ok(WHAT, bytes(limit)),
        Some(limit) => Check::advice(
            WHAT,
            bytes(limit),
            format!(
                "ulimit -l {} or more, so that io_uring can register its buffers",
                LOCKED_BYTES_MIN >> 10
            ),
        ),
    }
}

fn files(limit: Option<u64>) -> Check {
    const WHAT: &str = "open files";
    match limit {
        Some(limit) if limit < FILES_MIN => {
            Check::advice(WHAT, count(limit), format!("ulimit -n {FILES_MIN} or more"))
        }
        limit => Check::ok(WHAT, limit.map_or("unlimited".to_owned(), count)),
    }
}

fn map_count(seen: u64) -> Check {
    const WHAT: &str = "memory mappings";
    match seen >= MAP_COUNT_MIN {
        true => Check::ok(WHAT, count(seen)),
        false => Check::advice(
            WHAT,
            count(seen),
            format!(
                "sysctl vm.max_map_count={MAP_COUNT_MIN} or more: blocks that sleep need mappings of their own"
            ),
        ),
    }
}

fn overcommit(mode: u64) -> Check {
    const WHAT: &str = "overcommit";
    match mode {
        2 => Check::advice(
            WHAT,
            "vm.overcommit_memory is 2 (strict)",
            "sysctl vm.overcommit_memory=0: strict accounting may refuse memory that is free",
        ),
        mode => Check::ok(WHAT, format!("vm.overcommit_memory is {mode}")),
    }
}

/// The path of the unified control group of a process.
fn group_of(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(PathBuf::from(path.trim_start_matches('/')))
}

/// The smallest limit of a control group and those above it.
fn memory_max(root: &Path, group: &Path) -> Option<u64> {
    let groups =
        group.ancestors().take(GROUPS_MAX).map(|group| root.join(group).join("memory.max"));
    groups.filter_map(|file| number(&file.to_string_lossy())).min()
}

fn group_memory(limit: Option<u64>) -> Check {
    const WHAT: &str = "control group";
    match limit {
        Some(limit) => {
            Check::ok(WHAT, format!("memory limit {}; budgets in percent are of it", bytes(limit)))
        }
        None => Check::ok(WHAT, "no memory limit"),
    }
}

fn shared_memory(dir: &Path) -> Check {
    const WHAT: &str = "live figures";
    let probe = dir.join(format!("dormouse-doctor.{}", std::process::id()));
    let written = fs::File::create_new(&probe).and_then(|file| file.set_len(0));
    // Absent if it could not be created.
    let _ = fs::remove_file(&probe);
    match written {
        Ok(()) => Check::ok(WHAT, format!("{} is writable", dir.display())),
        Err(error) => Check::advice(
            WHAT,
            format!("{}: {error}", dir.display()),
            "dormouse top finds no trainer: mount it, or set DORMOUSE_STATS_FILE",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    const LIMITS: &str = "\
Limit                     Soft Limit           Hard Limit           Units     
Max open files            1048576              1048576              files     
Max locked memory         8388608              unlimited            bytes     
Max address space         unlimited            unlimited            bytes     
";

    #[test]
    fn soft_limits_are_read() {
        assert_eq!(limit(LIMITS, "Max open files"), Some(1_048_576));
        assert_eq!(limit(LIMITS, "Max locked memory"), Some(8 << 20));
        assert_eq!(limit(LIMITS, "Max address space"), None);
        assert_eq!(limit("", "Max open files"), None);
    }

    #[test]
    fn the_smallest_limit_above_a_group_counts() {
        let root = std::env::temp_dir().join(format!("dormouse-groups-{}", std::process::id()));
        let group = group_of("12:cpu:/old\n0::/a/b\n").unwrap();
        fs::create_dir_all(root.join(&group)).unwrap();
        fs::write(root.join("a/b/memory.max"), "max\n").unwrap();
        assert_eq!(memory_max(&root, &group), None);
        fs::write(root.join("a/memory.max"), "4096\n").unwrap();
        fs::write(root.join("memory.max"), "8192\n").unwrap();
        assert_eq!(memory_max(&root, &group), Some(4096));
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn limits_below_the_need_say_what_to_do() {
        let settings = Settings::default();
        assert_eq!(address_space(Some(0), &settings).verdict, Verdict::Broken);
        assert_eq!(address_space(None, &settings).verdict, Verdict::Ok);
        assert_eq!(
            [Some(8 << 20), Some(64 << 20), None].map(|it| locked(it).verdict),
            [Verdict::Advice, Verdict::Ok, Verdict::Ok]
        );
        assert_eq!([256, 1024].map(|it| files(Some(it)).verdict), [Verdict::Advice, Verdict::Ok]);
        assert_eq!([1000, 65_530].map(|it| map_count(it).verdict), [Verdict::Advice, Verdict::Ok]);
        assert_eq!(
            [0, 1, 2].map(|it| overcommit(it).verdict),
            [Verdict::Ok, Verdict::Ok, Verdict::Advice]
        );
        assert_eq!(shared_memory(Path::new("/nowhere")).verdict, Verdict::Advice);
    }
}
