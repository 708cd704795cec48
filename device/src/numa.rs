//! The NUMA node for pinned memory.

/// The kernel's list of nodes, as `0-1,3`.
const ONLINE: &str = "/sys/devices/system/node/online";
/// Limit of the node numbers: the bits of a mask.
pub(crate) const NODES_MAX: u32 = u64::BITS;

/// Parses a list such as `0-1,3` to a mask. `None` for anything else, or a node beyond the limit.
fn parse(list: &str) -> Option<u64> {
    list.trim().split(',').try_fold(0, |mask, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last >= NODES_MAX {
            return None;
        }
        let nodes = (u64::MAX >> (NODES_MAX - 1 - (last - first))) << first;
        Some(mask | nodes)
    })
}

/// Returns the mask of `node`, if several nodes are online and it is one of them.
fn choose(online: Option<u64>, node: Option<u32>) -> Option<u64> {
    let online = online.filter(|mask| mask.count_ones() > 1)?;
    let mask = 1_u64.checked_shl(node?)?;
    (online & mask != 0).then_some(mask)
}

/// Returns the mask of the node nearest to a device; `None` if there is one node, or the nearest is unknown.
pub(crate) fn mask_of(node: Option<u32>) -> Option<u64> {
    let online = std::fs::read_to_string(ONLINE).ok();
    choose(online.as_deref().and_then(parse), node)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn node_lists_are_parsed() {
        for (list, mask) in [("0\n", 1), ("0-1", 3), ("0-1,3\n", 0b1011), ("2,63", 1 << 63 | 4)] {
            assert_eq!(parse(list), Some(mask), "{list}");
        }
        assert_eq!(parse("0-63"), Some(u64::MAX));
        for list in ["", "1-0", "0-64", "64", "a", "0,", "-1", "0-1-2"] {
            assert_eq!(parse(list), None, "{list}");
        }
    }

    #[test]
    fn online_node_is_chosen_among_several() {
        assert_eq!(choose(Some(0b11), Some(1)), Some(0b10));
        assert_eq!(choose(Some(0b1), Some(0)), None, "one node");
        assert_eq!(choose(Some(0b11), None), None, "nearest node unknown");
        assert_eq!(choose(Some(0b11), Some(2)), None, "not online");
        assert_eq!(choose(Some(0b11), Some(64)), None, "no such node");
        assert_eq!(choose(None, Some(0)), None);
    }
}
