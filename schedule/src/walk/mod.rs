//! A batch as ops: depth first over a forest, waves of leaves, what each node does with its graph.
