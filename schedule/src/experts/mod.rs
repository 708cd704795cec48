//! Router statistics of a plan that computes a prefix once: multiplicities and the auxiliary loss.
