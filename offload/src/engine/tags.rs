//! Tags: a user's name for a set of regions that sleep and wake together.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};

use dormouse_device::Device;
use dormouse_timeline::NameId;

use super::sleep::{Initiator, NO_END};
use super::{Engine, RegionUses, SleepOutcome, Waited};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier, label};
use dormouse_residency::region::SleepGoal;
use dormouse_storage::sync::lock;

/// Limit on tags.
pub const TAGS_MAX: usize = 4096;
/// Limit on tags ever made in a process: each has a number of its own.
pub const TAGS_MADE_MAX: u32 = u32::MAX;
/// Limit on the length of a tag's name, in bytes.
pub const TAG_NAME_BYTES_MAX: usize = 64;

/// Identifies a tag; never 0, never reused in the process, by no other engine either: blocks keep the number of their
/// tag, and outlive engines. `Request::tag` holds this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagId(pub u32);

/// Bytes of a tag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagStats {
    /// Its name. Tags whose names the timeline does not tell apart ([`Timeline::intern`]) share one entry.
    ///
    /// [`Timeline::intern`]: dormouse_timeline::Timeline::intern
    pub name: String,
    /// Bytes on the device.
    pub resident_bytes: u64,
    /// Bytes asleep.
    pub asleep_bytes: u64,
}

#[derive(Debug)]
struct Tag {
    name: String,
    /// The same on the timeline.
    name_id: NameId,
    backup: bool,
    regions: Vec<RegionId>,
    /// The tag is being destroyed: nothing is added, nothing falls asleep.
    is_going: bool,
}

/// All tags.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    by_id: BTreeMap<TagId, Tag>,
}

/// Returns the next number of `numbers`, and `None` at [`TAGS_MADE_MAX`].
fn next_number(numbers: &AtomicU32) -> Option<u32> {
    let add = |last: u32| (last < TAGS_MADE_MAX).then(|| last + 1);
    // Relaxed: only uniqueness matters.
    let last = numbers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
    Some(last + 1)
}

impl<D: Device> Engine<D> {
    /// Creates a tag. Without `backup` a sleep discards the bytes and a wake returns zeroed pages.
    ///
    /// # Errors
    /// `Argument` for an empty, long or used name; `TooMany` at [`TAGS_MAX`] tags, and once the process has made
    /// [`TAGS_MADE_MAX`].
    pub fn tag_create(&self, name: &str, backup: bool) -> Result<TagId, OffloadError> {
        static LAST: AtomicU32 = AtomicU32::new(0);
        if name.is_empty() || name.len() > TAG_NAME_BYTES_MAX {
            let accepted = format!("1 to {TAG_NAME_BYTES_MAX} bytes");
            return Err(OffloadError::argument("tag name", format!("{name:?}"), accepted));
        }
        let name_id = self.timeline.intern(name);
        let mut tags = lock(&self.tags);
        if tags.by_id.values().any(|t| t.name == name) {
            return Err(OffloadError::argument("tag name", format!("{name:?}"), "one not in use"));
        }
        let too_many = |what, limit| OffloadError::TooMany { what, limit };
        if tags.by_id.len() >= TAGS_MAX {
            return Err(too_many("tags", TAGS_MAX as u64));
        }
        let number = next_number(&LAST);
        let id = TagId(number.ok_or_else(|| too_many("tags of a process", TAGS_MADE_MAX.into()))?);
        tags.by_id.insert(
            id,
            Tag { name: name.to_owned(), name_id, backup, regions: Vec::new(), is_going: false },
        );
        Ok(id)
    }

    /// Returns the name of a tag, unless it was destroyed.
    #[must_use]
    pub fn tag_name(&self, tag: TagId) -> Option<String> {
        lock(&self.tags).by_id.get(&tag).map(|it| it.name.clone())
    }

    /// Returns the bytes of every tag, the largest first: its regions, and blocks allocated with its number that are
    /// not regions yet. Takes time proportional to the number of tags. Values are not read at one instant.
    #[must_use]
    pub fn tag_stats(&self) -> Vec<TagStats> {
        let mut stats: HashMap<NameId, TagStats> = HashMap::new();
        {
            let unclaimed: BTreeMap<u32, u64> = self.allocator.tagged_bytes().into_iter().collect();
            let tags = lock(&self.tags);
            for (id, tag) in &tags.by_id {
                let found = stats.entry(tag.name_id).or_default();
                found.resident_bytes += unclaimed.get(&id.0).copied().unwrap_or(0);
                found.name.clone_from(&tag.name);
            }
        }
        for (name_id, levels) in self.table.lock().shared.owners.tags() {
            if let Some(found) = stats.get_mut(&name_id) {
                found.resident_bytes += levels.awake_bytes;
                found.asleep_bytes += levels.asleep_bytes;
            }
        }
        let mut stats: Vec<TagStats> = stats.into_values().collect();
        stats.sort_unstable_by(|a, b| {
            let bytes = |it: &TagStats| it.resident_bytes.saturating_add(it.asleep_bytes);
            bytes(b).cmp(&bytes(a)).then_with(|| a.name.cmp(&b.name))
        });
        stats
    }

    /// Wakes the tag's regions, releases them and destroys the tag. Nothing is added meanwhile.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::wait_awake`], and the tag is kept.
    pub fn tag_destroy(&self, tag: TagId) -> Result<(), OffloadError> {
        match lock(&self.tags).by_id.get_mut(&tag) {
            Some(found) if !found.is_going => found.is_going = true,
            _ => return Err(stale(tag)),
        }
        self.note_level_now();
        let given_back = self.give_back_under(tag);
        let mut tags = lock(&self.tags);
        if given_back.is_ok() {
            tags.by_id.remove(&tag);
        } else if let Some(found) = tags.by_id.get_mut(&tag) {
            found.is_going = false;
        }
        given_back
    }

    fn give_back_under(&self, tag: TagId) -> Result<(), OffloadError> {
        let regions = self.tag_regions(tag)?;
        self.wait_awake(&regions)?;
        for id in regions {
            match self.release(id) {
                // Freed by its owner meanwhile.
                Ok(()) | Err(OffloadError::Stale { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Adds the block around `address` to the tag.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::adopt`].
    pub fn tag_add(&self, tag: TagId, address: usize) -> Result<RegionId, OffloadError> {
        let found = lock(&self.tags).by_id.get(&tag).map(|t| (label(&t.name, None), t.name_id));
        let (label, name_id) = found.ok_or_else(|| stale(tag))?;
        if let Some(id) = self.region_at(address)
            && self.tag_regions(tag)?.contains(&id)
        {
            return Ok(id);
        }
        let id = self.adopt_for(address, Role::Tagged, label, name_id)?;
        let mut tags = lock(&self.tags);
        match tags.by_id.get_mut(&tag).filter(|tag| !tag.is_going) {
            Some(tag) => tag.regions.push(id),
            None => {
                drop(tags);
                // Destroyed meanwhile: the block stays its owner's alone.
                self.release(id)?;
                return Err(stale(tag));
            }
        }
        Ok(id)
    }

    /// Puts the tag's memory to sleep: blocks added, and blocks allocated with its number in
    /// `Request::tag`, behind `after` and the work so far on streams that the allocator knows to use it. What a
    /// destroyed stream may use stays awake.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::sleep`].
    pub fn tag_sleep(
        &self,
        tag: TagId,
        tier: Tier,
        after: &[D::Event],
    ) -> Result<SleepOutcome, OffloadError> {
        let backup = lock(&self.tags).by_id.get(&tag).filter(|t| !t.is_going).map(|t| t.backup);
        let backup = backup.ok_or_else(|| stale(tag))?;
        for block in self.allocator.blocks() {
            if block.tag == tag.0 && block.claimed.is_none() && !block.free_deferred {
                match self.tag_add(tag, block.range.start) {
                    // Freed or claimed since the look, or without a whole page: it stays awake.
                    Ok(_)
                    | Err(
                        OffloadError::NotOurs { .. }
                        | OffloadError::Claimed { .. }
                        | OffloadError::NoWholePage { .. },
                    ) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        let regions = self.tag_regions(tag)?;
        let RegionUses { known, without_end, mut events } = self.uses_end(&regions)?;
        events.extend_from_slice(after);
        let mut outcome = if backup {
            self.sleep(&known, tier, &events)?
        } else {
            self.sleep_to(&known, SleepGoal::Empty, &events, Initiator::Caller)?
        };
        for region in without_end.iter().filter_map(|&id| self.region_info(id).ok()) {
            outcome.decline(region.range.bytes as u64, NO_END);
        }
        Ok(outcome)
    }

    /// Wakes the tag's memory and blocks until its bytes are there, and the host memory that had them is free for
    /// the next sleep.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::wait_awake`].
    pub fn tag_wait(&self, tag: TagId) -> Result<Waited, OffloadError> {
        let regions = self.tag_regions(tag)?;
        let waited = self.wait_awake(&regions)?;
        self.wait_for_hosts(&regions)?;
        Ok(waited)
    }

    /// Returns the tag's regions that still exist.
    ///
    /// # Errors
    /// `Stale`.
    pub fn tag_regions(&self, tag: TagId) -> Result<Vec<RegionId>, OffloadError> {
        let mut tags = lock(&self.tags);
        let found = tags.by_id.get_mut(&tag).ok_or_else(|| stale(tag))?;
        found.regions.retain(|&id| self.table.with(id, |_| ()).is_some());
        Ok(found.regions.clone())
    }
}

fn stale(tag: TagId) -> OffloadError {
    OffloadError::Stale { what: "tag", id: tag.0.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_is_given_twice() {
        let numbers = AtomicU32::new(TAGS_MADE_MAX - 1);
        assert_eq!(next_number(&numbers), Some(TAGS_MADE_MAX));
        assert_eq!(next_number(&numbers), None);
        assert_eq!(next_number(&numbers), None);
    }
}
