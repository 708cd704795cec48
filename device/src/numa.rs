//! On which node of the machine's memory pinned pages should lie. Text and numbers in, a decision
//! out; who asks the kernel for it is elsewhere.

/// Where the kernel lists its nodes, as `0-1,3`.
const ONLINE: &str = "/sys/devices/system/node/online";
/// A node's number is below this: what one word of a mask can name.
pub(crate) const NODES_MAX: u32 = u64::BITS;

/// The mask of nodes that a list such as `0-1,3` names. `None` for anything else, or a node that
/// no mask of ours can name.
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

/// The mask to ask for: `node`'s alone, where there is a choice and it is one of those online.
fn choose(online: Option<u64>, node: Option<u32>) -> Option<u64> {
    let online = online.filter(|mask| mask.count_ones() > 1)?;
    let mask = 1_u64.checked_shl(node?)?;
    (online & mask != 0).then_some(mask)
}

/// The mask of the node nearest to a device; `None` where the machine has one node, or does not
/// say which is near.
pub(crate) fn mask_of(node: Option<u32>) -> Option<u64> {
    let online = std::fs::read_to_string(ONLINE).ok();
    choose(online.as_deref().and_then(parse), node)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        for (list, mask) in [("0\n", 1), ("0-1", 3), ("0-1,3\n", 0b1011), ("2,63", 1 << 63 | 4)] {
            assert_eq!(parse(list), Some(mask), "{list}");
        }
        assert_eq!(parse("0-63"), Some(u64::MAX));
        for list in ["", "1-0", "0-64", "64", "a", "0,", "-1", "0-1-2"] {
            assert_eq!(parse(list), None, "{list}");
        }
    }

    #[test]
    fn a_node_is_chosen_where_there_is_a_choice() {
        assert_eq!(choose(Some(0b11), Some(1)), Some(0b10));
        assert_eq!(choose(Some(0b1), Some(0)), None, "one node: nothing to choose");
        assert_eq!(choose(Some(0b11), None), None, "nobody says which is near");
        assert_eq!(choose(Some(0b11), Some(2)), None, "not online");
        assert_eq!(choose(Some(0b11), Some(64)), None, "no such node");
        assert_eq!(choose(None, Some(0)), None);
    }
}
