"""Makes what the benchmarks share importable from each of them."""
