//! Time, simulated: a plan replayed against a machine.
