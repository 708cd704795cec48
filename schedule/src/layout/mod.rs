//! Layouts of a wave: padded and packed, positions, cumulative lengths.
