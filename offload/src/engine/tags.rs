//! Tags: a user's name for a set of regions that sleep and wake together.

use std::collections::BTreeMap;

use dormouse_device::Device;

use super::sleep::Initiator;
use super::{Engine, SleepOutcome, Waited};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier, label};
use dormouse_residency::region::SleepGoal;
use dormouse_storage::sync::lock;

/// Limit on tags.
pub const TAGS_MAX: usize = 4096;
/// Limit on the length of a tag's name, in bytes.
pub const TAG_NAME_BYTES_MAX: usize = 64;

/// Identifies a tag; never 0, never reused. `Request::tag` holds this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TagId(pub u32);

#[derive(Debug)]
struct Tag {
    name: String,
    backup: bool,
    regions: Vec<RegionId>,
    /// The tag is being destroyed: nothing is added, nothing falls asleep.
    is_going: bool,
}

/// All tags.
#[derive(Debug, Default)]
pub(crate) struct Tags {
    by_id: BTreeMap<TagId, Tag>,
    last: u32,
}

impl<D: Device> Engine<D> {
    /// Creates a tag. Without `backup` a sleep discards the bytes and a wake returns zeroed pages.
    ///
    /// # Errors
    /// `Argument` for an empty, long or used name; `TooMany`.
    pub fn tag_create(&self, name: &str, backup: bool) -> Result<TagId, OffloadError> {
        if name.is_empty() || name.len() > TAG_NAME_BYTES_MAX {
            let accepted = format!("1 to {TAG_NAME_BYTES_MAX} bytes");
            return Err(OffloadError::argument("tag name", format!("{name:?}"), accepted));
        }
        let mut tags = lock(&self.tags);
        if tags.by_id.values().any(|t| t.name == name) {
            return Err(OffloadError::argument("tag name", format!("{name:?}"), "one not in use"));
        }
        if tags.by_id.len() >= TAGS_MAX || tags.last == u32::MAX {
            return Err(OffloadError::TooMany { what: "tags", limit: TAGS_MAX as u64 });
        }
        tags.last += 1;
        let id = TagId(tags.last);
        tags.by_id.insert(
            id,
            Tag { name: name.to_owned(), backup, regions: Vec::new(), is_going: false },
        );
        Ok(id)
    }

    /// Returns the name of a tag, unless it was destroyed.
    #[must_use]
    pub fn tag_name(&self, tag: TagId) -> Option<String> {
        lock(&self.tags).by_id.get(&tag).map(|it| it.name.clone())
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
        let name = lock(&self.tags).by_id.get(&tag).map(|t| t.name.clone());
        let name = name.ok_or_else(|| stale(tag))?;
        if let Some(id) = self.region_at(address)
            && self.tag_regions(tag)?.contains(&id)
        {
            return Ok(id);
        }
        let id = self.adopt(address, Role::Tagged, label(&name, None))?;
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
    /// `Request::tag`, behind `after` and the work so far on streams that the allocator knows to use it.
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
        let mut uses = self.uses_end(&regions)?;
        uses.extend_from_slice(after);
        if backup {
            return self.sleep(&regions, tier, &uses);
        }
        self.sleep_to(&regions, SleepGoal::Empty, &uses, Initiator::Caller)
    }

    /// Wakes the tag's memory and blocks until its bytes are there.
    ///
    /// # Errors
    /// `Stale`; as [`Engine::wait_awake`].
    pub fn tag_wait(&self, tag: TagId) -> Result<Waited, OffloadError> {
        self.wait_awake(&self.tag_regions(tag)?)
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
