//! Whole lives of a prefix: a trainer that allocates, forgets, reads and frees as autograd does.

mod on_cuda;
mod on_host;
