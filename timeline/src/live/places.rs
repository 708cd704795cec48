//! Where pages are without a setting: `/dev/shm/dormouse.<uid>.<pid>`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::file::{is_held, open};

/// Directory of the pages of processes that name none: a memory file system.
pub const DEFAULT_DIR: &str = "/dev/shm";
/// Maximum number of pages listed.
const PAGES_MAX: usize = 1024;

/// Returns what precedes the pid in the name of a page of this user; `None` without `/proc`.
#[must_use]
pub fn default_prefix() -> Option<String> {
    // The files of a process belong to its effective user.
    let uid = fs::metadata("/proc/self").ok()?.uid();
    Some(format!("dormouse.{uid}."))
}

/// Lists the pages of this user's processes, by pid. Pages of processes that have ended are among them.
#[must_use]
pub fn default_pages() -> Vec<PathBuf> {
    default_prefix().map(|prefix| pages(Path::new(DEFAULT_DIR), &prefix)).unwrap_or_default()
}

/// Removes the pages that processes of this user left when they were killed.
pub fn remove_ended() {
    default_pages().iter().for_each(|page| remove_if_ended(page));
}

fn remove_if_ended(page: &Path) {
    // A page has its lock before it has its name.
    if open(page).is_ok_and(|(file, _)| !is_held(&file)) {
        let _absent = fs::remove_file(page);
    }
}

fn pages(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let pid = |name: &str| name.strip_prefix(prefix)?.parse::<u32>().ok();
    let of_user = entries.flatten().filter_map(|entry| {
        let pid = pid(entry.file_name().to_str()?)?;
        Some((pid, entry.path()))
    });
    let mut pages: Vec<_> = of_user.take(PAGES_MAX).collect();
    pages.sort();
    pages.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::tests::{folder, numbered, this};
    use super::super::{LivePage, read};
    use super::*;

    #[test]
    fn pages_are_named_by_user_and_process() {
        let dir = folder("places");
        let names = ["d.7.30", "d.7.4", "d.70.4", "d.7.", "d.7.x", "d.7.4.30.tmp", "e.7.4"];
        names.iter().for_each(|name| fs::write(dir.join(name), "").unwrap());
        assert_eq!(pages(&dir, "d.7."), [dir.join("d.7.4"), dir.join("d.7.30")]);
        assert!(pages(&dir.join("absent"), "d.7.").is_empty());
    }

    #[test]
    fn the_page_of_a_killed_process_is_removed_and_no_other() {
        let dir = folder("ended");
        let [running, ended, other] = ["running", "ended", "other"].map(|name| dir.join(name));
        let _page = LivePage::create(&running, &this(), &numbered(1)).unwrap();
        fs::copy(&running, &ended).unwrap();
        fs::write(&other, "not a page").unwrap();
        assert!(read(&running).unwrap().is_running);
        assert!(!read(&ended).unwrap().is_running);
        [&running, &ended, &other].iter().for_each(|page| remove_if_ended(page));
        assert!(running.exists() && !ended.exists() && other.exists());
    }
}
