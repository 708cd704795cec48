//! The tests on a GPU again, while the host is ahead of it: streams are never idle, events are late.

use standin::run_again_ahead;

/// Part of the names of the tests on a GPU, the prefix's too.
const ON_CUDA: &str = "on_cuda::";

#[test]
fn one_work_ahead() {
    run_again_ahead(1, ON_CUDA, &[]);
}

#[test]
fn four_works_ahead_without_large_pages() {
    run_again_ahead(4, ON_CUDA, &[("DORMOUSE_TEST_LARGE_PAGES", "1")]);
}
