//! Where pages are without a setting: `/dev/shm/dormouse.<uid>.<pid>`, or `….<pid>.<number>` where a running process has that place.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::file::open;

/// Directory of the pages of processes that name none: a memory file system.
pub const DEFAULT_DIR: &str = "/dev/shm";
/// Maximum number of pages listed.
const PAGES_MAX: usize = 1024;

/// Maximum number of places tried for one page.
const PLACES_MAX: u32 = 64;

/// Returns `path`, or the first of `path.1`, `path.2` and so on where no running process has a page: containers share
/// `/dev/shm` and not their pids. Returns `path` if all of 64 are taken.
#[must_use]
pub fn free_place(path: &Path) -> PathBuf {
    let numbered = |number: u32| {
        let mut place = path.as_os_str().to_owned();
        place.push(format!(".{number}"));
        PathBuf::from(place)
    };
    let mut places = std::iter::once(path.to_owned()).chain((1..PLACES_MAX).map(numbered));
    let is_taken = |place: &PathBuf| open(place).is_ok_and(|page| page.is_held());
    places.find(|place| !is_taken(place)).unwrap_or_else(|| path.to_owned())
}

/// Returns what precedes the pid in the name of a page of this user; `None` without `/proc`.
#[must_use]
pub fn default_prefix() -> Option<String> {
    own_uid().map(prefix_of)
}

fn prefix_of(uid: u32) -> String {
    format!("dormouse.{uid}.")
}

fn own_uid() -> Option<u32> {
    // The files of a process belong to its effective user.
    Some(fs::metadata("/proc/self").ok()?.uid())
}

/// Lists the pages of this user's processes, by pid. Pages of processes that have ended are among them.
#[must_use]
pub fn default_pages() -> Vec<PathBuf> {
    own_uid().map(|uid| pages(Path::new(DEFAULT_DIR), &prefix_of(uid), uid)).unwrap_or_default()
}

/// Removes the pages that processes of this user left when they were killed.
pub fn remove_ended() {
    default_pages().iter().for_each(|page| remove_if_ended(page));
}

fn remove_if_ended(page: &Path) {
    // A page has its lock before it has its name.
    if open(page).is_ok_and(|page| !page.is_held()) {
        let _absent = fs::remove_file(page);
    }
}

/// Lists the files of `uid` alone: any user can give a file any name here, and their number must not hide ours.
fn pages(dir: &Path, prefix: &str, uid: u32) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let order = |name: &str| {
        let name = name.strip_prefix(prefix)?;
        let (pid, number) = name.split_once('.').unwrap_or((name, "0"));
        Some((pid.parse::<u32>().ok()?, number.parse::<u32>().ok()?))
    };
    let of_user = entries.flatten().filter_map(|entry| {
        let order = order(entry.file_name().to_str()?)?;
        // Of a symbolic link, that of the link.
        let is_own = entry.metadata().is_ok_and(|found| found.uid() == uid);
        is_own.then(|| (order, entry.path()))
    });
    let mut pages: Vec<_> = of_user.take(PAGES_MAX).collect();
    pages.sort();
    pages.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::io::Write as _;

    use super::super::tests::{folder, numbered, this};
    use super::super::{LivePage, read};
    use super::*;

    #[test]
    fn pages_are_named_by_user_and_process() {
        let dir = folder("places");
        let names = ["d.7.30", "d.7.4", "d.70.4", "d.7.", "d.7.x", "d.7.4.30.tmp", "e.7.4"];
        names.iter().for_each(|name| fs::write(dir.join(name), "").unwrap());
        let uid = own_uid().unwrap();
        assert_eq!(pages(&dir, "d.7.", uid), [dir.join("d.7.4"), dir.join("d.7.30")]);
        assert!(pages(&dir.join("absent"), "d.7.", uid).is_empty());
        assert!(pages(&dir, "d.7.", uid + 1).is_empty(), "another user's");
    }

    #[test]
    fn a_page_leaves_the_place_of_a_running_process() {
        let (dir, uid) = (folder("taken"), own_uid().unwrap());
        let built_in = dir.join("d.7.1");
        let create = |figures| LivePage::create(&free_place(&built_in), &this(), &figures).unwrap();
        let (first, second, third) =
            (create(numbered(1)), create(numbered(2)), create(numbered(3)));
        let listed = pages(&dir, "d.7.", uid);
        assert_eq!(listed, ["d.7.1", "d.7.1.1", "d.7.1.2"].map(|name| dir.join(name)));
        let figures: Vec<_> = listed.iter().map(|page| read(page).unwrap().figures).collect();
        assert_eq!(figures, [numbered(1), numbered(2), numbered(3)]);
        drop(second);
        assert_eq!(free_place(&built_in), dir.join("d.7.1.1"));
        drop((first, third));
        assert_eq!(free_place(&built_in), built_in);
        fs::write(&built_in, "left by a killed process").unwrap();
        assert_eq!(free_place(&built_in), built_in);
    }

    /// Only root can give files away.
    #[test]
    fn pages_of_other_users_do_not_hide_ours() {
        let (dir, uid) = (folder("owners"), own_uid().unwrap());
        let own = dir.join("d.7.5000");
        for pid in 0..PAGES_MAX {
            let foreign = dir.join(format!("d.7.{pid}"));
            fs::write(&foreign, "").unwrap();
            if let Err(error) = std::os::unix::fs::chown(&foreign, Some(uid + 1), None) {
                let _ = writeln!(std::io::stderr(), "skipped: no file can be given away ({error})");
                return;
            }
        }
        fs::write(&own, "").unwrap();
        assert_eq!(pages(&dir, "d.7.", uid), [own]);
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
