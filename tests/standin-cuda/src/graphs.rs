//! Graphs: what a capture was given, done again whenever it is launched. One work after the other,
//! in the order they were captured, which is one of those the capture allows.

use std::collections::BTreeMap;
use std::ffi::c_ulonglong;
use std::sync::Arc;

use crate::code::Code;
use crate::entry::{Out, entry};
use crate::state::{driver, lock, new_name};
use crate::streams;

/// Something a stream is given.
pub(crate) type Work = Arc<dyn Fn() + Send + Sync>;

/// The flags there are: free on launch, upload, device launch, node priority.
const FLAGS: c_ulonglong = 0b1111;

/// Graphs and what was instantiated of them, by handle.
#[derive(Default)]
pub(crate) struct Graphs {
    captured: BTreeMap<usize, Arc<[Work]>>,
    instances: BTreeMap<usize, Arc<[Work]>>,
}

impl Graphs {
    /// A capture has ended.
    pub(crate) fn add(&mut self, graph: usize, works: Vec<Work>) {
        self.captured.insert(graph, works.into());
    }
}

entry! { Init, fn cuGraphGetNodes(graph: usize, nodes: Out<usize>, count: Out<usize>) {
    let graphs = lock(&driver()?.graphs);
    let works = graphs.captured.get(&graph).ok_or(Code::INVALID_VALUE)?;
    // Only how many there are: a work has no handle.
    if nodes.check().is_ok() {
        return Err(Code::NOT_SUPPORTED);
    }
    count.put(works.len())
}}

entry! { Context, fn cuGraphInstantiateWithFlags(
    instance: Out<usize>,
    graph: usize,
    flags: c_ulonglong,
) {
    let mut graphs = lock(&driver()?.graphs);
    let works = graphs.captured.get(&graph).cloned().ok_or(Code::INVALID_VALUE)?;
    if flags & !FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let name = new_name();
    instance.put(name)?;
    graphs.instances.insert(name, works);
    Ok(())
}}

entry! { Context, fn cuGraphLaunch(instance: usize, stream: usize) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    let works = lock(&driver.graphs).instances.get(&instance).cloned();
    for work in works.ok_or(Code::INVALID_VALUE)?.iter().cloned() {
        streams::give(driver, &stream, move || work())?;
    }
    Ok(())
}}

entry! { Init, fn cuGraphDestroy(graph: usize) {
    let removed = lock(&driver()?.graphs).captured.remove(&graph);
    removed.map(drop).ok_or(Code::INVALID_VALUE)
}}

// What was launched of it still runs.
entry! { Init, fn cuGraphExecDestroy(instance: usize) {
    let removed = lock(&driver()?.graphs).instances.remove(&instance);
    removed.map(drop).ok_or(Code::INVALID_VALUE)
}}
