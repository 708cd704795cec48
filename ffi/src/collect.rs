//! Which layer and which tag the calling thread's new blocks belong to.
//!
//! Read on every heap allocation, so it is in constant-initialised cells: no destructor, no lazy
//! initialisation, no lock.

use std::cell::Cell;

use dormouse_alloc::{ArenaId, ThreadShard};

use crate::dumps::DeviceId;
use crate::fault::Fault;
use crate::status;

/// Maximum number of nested tags of one thread.
pub(crate) const TAG_DEPTH_MAX: usize = 16;

thread_local! {
    /// One cell: in a library, each access to a thread-local variable is a function call.
    static COLLECTING: Cell<Collecting> = const { Cell::new(Collecting::NOTHING) };
    static TAGS: Cell<[OpenTag; TAG_DEPTH_MAX]> = const { Cell::new([OpenTag::NONE; TAG_DEPTH_MAX]) };
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Owner of this thread's new blocks: of those on the devices of its window and its tags. It allocates on others
/// meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Collecting {
    pub(crate) window: Window,
    /// The innermost tag.
    pub(crate) tag: OpenTag,
    /// The shard of the thread cache, while no window and no tag is open.
    plain_shard: Option<ThreadShard>,
}

impl Collecting {
    const NOTHING: Self = Self { window: Window::NONE, tag: OpenTag::NONE, plain_shard: None };
}

/// A tag that the thread is inside of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenTag {
    /// 0: none.
    pub(crate) number: u32,
    pub(crate) device: Option<DeviceId>,
}

impl OpenTag {
    const NONE: Self = Self { number: 0, device: None };
}

/// The interval between a layer's forward marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Number of the layer; 0: none.
    pub(crate) scope: u64,
    /// Arena of the layer's prefix.
    pub(crate) arena: Option<ArenaId>,
    pub(crate) device: Option<DeviceId>,
}

impl Window {
    pub(crate) const NONE: Self = Self { scope: 0, arena: None, device: None };
}

/// Returns the open window and tag of this thread.
#[inline]
pub(crate) fn collecting() -> Collecting {
    COLLECTING.get()
}

/// Returns the thread-cache shard of this thread if no window and no tag is open. `None` before the
/// first [`settled`].
#[inline]
pub(crate) fn plain_shard() -> Option<ThreadShard> {
    COLLECTING.with(|cell| cell.get().plain_shard)
}

/// Returns the open window of this thread and the number of its innermost tag, 0 without one, both only if they are of
/// `device`. Assigns the thread a thread-cache shard.
#[inline]
pub(crate) fn settled(device: DeviceId) -> (Window, u32) {
    let Collecting { window, tag, .. } = settle(|now| now);
    let window = if window.device == Some(device) { window } else { Window::NONE };
    let is_own = tag == OpenTag::NONE || tag.device == Some(device);
    (window, if is_own { tag.number } else { outer_tag(device) })
}

/// Returns the number of the innermost tag of `device`; 0 without one.
#[cold]
fn outer_tag(device: DeviceId) -> u32 {
    let (tags, depth) = (TAGS.get(), DEPTH.get());
    let mut open = tags.iter().take(depth).rev();
    open.find(|tag| tag.device == Some(device)).map_or(0, |tag| tag.number)
}

/// Opens a window on this thread, or closes it with [`Window::NONE`].
pub(crate) fn set_window(window: Window) {
    settle(|now| Collecting { window, ..now });
}

/// Applies `change`, and assigns a shard if nothing is open afterwards.
#[inline]
fn settle(change: impl FnOnce(Collecting) -> Collecting) -> Collecting {
    COLLECTING.with(|cell| {
        let now = change(cell.get());
        let is_plain = now.window == Window::NONE && now.tag == OpenTag::NONE;
        let shard = || now.plain_shard.unwrap_or_else(ThreadShard::current);
        let settled = Collecting { plain_shard: is_plain.then(shard), ..now };
        cell.set(settled);
        settled
    })
}

/// Makes tag `number` of `device` the innermost tag of this thread.
pub(crate) fn enter_tag(number: u32, device: DeviceId) -> Result<(), Fault> {
    let tag = OpenTag { number, device: Some(device) };
    let depth = DEPTH.get();
    let mut tags = TAGS.get();
    let Some(place) = tags.get_mut(depth) else {
        return Err(Fault::new(
            status::DORMOUSE_ERR_LIMIT,
            format!("nesting limit reached ({TAG_DEPTH_MAX} tags on this thread)"),
        ));
    };
    *place = tag;
    TAGS.set(tags);
    DEPTH.set(depth + 1);
    settle(|now| Collecting { tag, ..now });
    Ok(())
}

/// Leaves tag `number`, which must be the innermost.
pub(crate) fn leave_tag(number: u32) -> Result<(), Fault> {
    let depth = DEPTH.get();
    if depth == 0 || collecting().tag.number != number {
        return Err(Fault::new(
            status::DORMOUSE_ERR_STATE,
            if depth == 0 {
                "this thread is inside no tag; accepted: leave after enter"
            } else {
                "this thread is inside another tag; accepted: leave the innermost tag first"
            },
        ));
    }
    DEPTH.set(depth - 1);
    let outer = depth.checked_sub(2).and_then(|at| TAGS.get().get(at).copied());
    let outer = outer.unwrap_or(OpenTag::NONE);
    settle(|now| Collecting { tag: outer, ..now });
    Ok(())
}

#[cfg(test)]
mod tests {
    use dormouse_device::DeviceKind;

    use super::*;

    const HOST: DeviceId = (DeviceKind::Host, 0);
    const GPU: DeviceId = (DeviceKind::Cuda, 0);

    fn tag() -> u32 {
        collecting().tag.number
    }

    fn window() -> Window {
        collecting().window
    }

    #[test]
    fn the_innermost_tag_counts_and_is_left_first() {
        enter_tag(5, HOST).unwrap();
        enter_tag(7, HOST).unwrap();
        assert_eq!(tag(), 7);
        assert_eq!(leave_tag(5).unwrap_err().status, status::DORMOUSE_ERR_STATE);
        leave_tag(7).unwrap();
        assert_eq!(tag(), 5);
        leave_tag(5).unwrap();
        assert_eq!((tag(), leave_tag(5).unwrap_err().status), (0, status::DORMOUSE_ERR_STATE));
    }

    #[test]
    fn the_nesting_limit_is_refused_and_keeps_the_tags() {
        for at in 0..TAG_DEPTH_MAX {
            enter_tag(at as u32 + 1, HOST).unwrap();
        }
        assert_eq!(enter_tag(99, HOST).unwrap_err().status, status::DORMOUSE_ERR_LIMIT);
        assert_eq!(tag(), TAG_DEPTH_MAX as u32);
        for at in (0..TAG_DEPTH_MAX).rev() {
            leave_tag(at as u32 + 1).unwrap();
        }
    }

    #[test]
    fn each_thread_has_its_own_window() {
        set_window(Window { scope: 3, arena: None, device: Some(HOST) });
        assert_eq!(std::thread::spawn(window).join().unwrap(), Window::NONE);
        set_window(Window::NONE);
    }

    #[test]
    fn a_window_and_a_tag_collect_blocks_of_their_own_device() {
        let layer = Window { scope: 3, arena: None, device: Some(GPU) };
        set_window(layer);
        enter_tag(5, HOST).unwrap();
        assert_eq!((settled(HOST), settled(GPU)), ((Window::NONE, 5), (layer, 0)));
        enter_tag(7, GPU).unwrap();
        enter_tag(8, GPU).unwrap();
        assert_eq!((settled(HOST), settled(GPU)), ((Window::NONE, 5), (layer, 8)));
        assert_eq!(settled((DeviceKind::Cuda, 1)), (Window::NONE, 0));
        [8, 7].into_iter().for_each(|tag| leave_tag(tag).unwrap());
        set_window(Window::NONE);
        assert_eq!((settled(HOST).1, settled(GPU).1), (5, 0));
        leave_tag(5).unwrap();
        assert_eq!(settled(HOST), (Window::NONE, 0));
    }
}
