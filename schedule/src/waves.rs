//! Packing suffixes into waves under a row budget.

/// Groups suffix indices into waves: first-fit decreasing by rows, ties by index, which is within
/// 11/9 of the fewest waves possible. Members of a wave come in sequence order, and waves in the
/// order of their first member, so that the result reads as the group does.
///
/// A suffix longer than the budget gets a wave of its own (I3).
pub(crate) fn pack(rows: &[u64], budget: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(rows[index]), index));
    let mut waves: Vec<(u64, Vec<usize>)> = Vec::new();
    for index in order {
        let fits = |used: u64| used.saturating_add(rows[index]) <= budget;
        match waves.iter_mut().find(|(used, _)| fits(*used)) {
            Some((used, members)) => {
                *used += rows[index];
                members.push(index);
            }
            None => waves.push((rows[index], vec![index])),
        }
    }
    let mut waves: Vec<Vec<usize>> = waves
        .into_iter()
        .map(|(_, mut members)| {
            members.sort_unstable();
            members
        })
        .collect();
    waves.sort_by_key(|members| members.first().copied());
    waves
}
