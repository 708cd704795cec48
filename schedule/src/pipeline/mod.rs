//! Op lists of pipeline stages.
