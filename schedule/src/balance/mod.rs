//! Shares of data-parallel ranks.
