//! Context-parallel shards of prefix and suffix.
