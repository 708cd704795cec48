//! How fast the file tier reads and writes, and at what cost: the driver of `make bench-offload`.
//!
//! ```text
//! nvme_rate DIR FILE_BYTES auto|uring|threads THREADS DEPTH
//! ```
//! makes the file, says how, and then answers each line of its input with a line of JSON: bytes,
//! seconds, CPU seconds. A line is `write` or `read`, `sums` or `plain`, and a file whose pages are
//! the memory to use: what a disk does depends on them, so others are given the same.
#![allow(unsafe_code, reason = "maps memory, and asks the system for CPU time")]

use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::thread;
use std::time::Instant;

use dormouse_device::AddressRange;
use dormouse_storage::{
    CHUNK_BYTES, Extent, IoEngine, IoMemory, IoOperation, Nvme, NvmeConfig, NvmeError, Queue,
    Transfer,
};
use memmap2::MmapMut;

/// A region: the bytes of one transfer.
const REGION_BYTES: usize = CHUNK_BYTES;

/// One thread's part of the file.
struct Lane {
    queue: Box<dyn Queue>,
    extents: Vec<Extent>,
}

impl Lane {
    /// Moves every extent, each from or to the next free piece of memory, the queue always full.
    fn run(
        &mut self,
        operation: IoOperation,
        takes_sums: bool,
        pieces: &[IoMemory],
    ) -> Result<(), NvmeError> {
        let mut slots: Vec<Option<(usize, Transfer)>> = pieces.iter().map(|_| None).collect();
        let (mut next, mut unanswered) = (0, 0);
        let depth = match operation {
            IoOperation::Read => self.queue.depth(),
            // As the pool has it: writes leave room for reads.
            IoOperation::Write => self.queue.depth() - self.queue.depth() / 4,
        };
        loop {
            let mut asked = None;
            for (at, slot) in slots.iter_mut().enumerate() {
                if unanswered == depth {
                    break;
                }
                if slot.is_none() && next < self.extents.len() {
                    let extent = &self.extents[next];
                    let transfer = match operation {
                        IoOperation::Write => extent.writer(pieces[at], takes_sums),
                        IoOperation::Read => extent.reader(pieces[at]),
                    };
                    *slot = Some((next, transfer));
                    next += 1;
                }
                let Some((_, transfer)) = slot else { continue };
                asked = transfer.next_request().map(|(chunk, request)| (at, chunk, request));
                if asked.is_some() {
                    break;
                }
            }
            if let Some((at, chunk, request)) = asked {
                self.queue.push((at as u64) << 32 | u64::from(chunk), request);
                unanswered += 1;
                continue;
            }
            let Some(answer) = self.queue.wait() else { return Ok(()) };
            unanswered -= 1;
            let slot = &mut slots[(answer.token >> 32) as usize];
            let Some((extent, mut transfer)) = slot.take() else { continue };
            transfer.answer(answer.token as u32, answer.result);
            if !transfer.is_over() {
                *slot = Some((extent, transfer));
            } else if let (sums, IoOperation::Write) = (transfer.outcome()?, operation) {
                self.extents[extent].set_sums(sums.unwrap_or_default());
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, file_bytes, engine, threads, depth] = arguments.as_slice() else {
        return Err("usage: nvme_rate DIR FILE_BYTES auto|uring|threads THREADS DEPTH".into());
    };
    let config = NvmeConfig {
        dir: dir.into(),
        file_bytes: file_bytes.parse()?,
        file_bytes_max: 0,
        io_threads: threads.parse()?,
        io_engine: IoEngine::named(engine).ok_or("the engine is auto, uring or threads")?,
        queue_depth: depth.parse()?,
        write_budget_bytes: 0,
    };
    let nvme = Nvme::create(&config, true)?;
    let mut lanes =
        (0..config.io_threads).map(|_| lane(&nvme, &config)).collect::<Result<Vec<_>, _>>()?;
    let usage = nvme.usage();
    let (name, note) = (usage.io_engine.name(), usage.io_note.unwrap_or_default());
    let mut out = io::stdout();
    writeln!(out, r#"{{"engine": "{name}", "note": {note:?}}}"#)?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let [way, sums, path] = words.as_slice() else {
            return Err("a line is: write|read sums|plain FILE".into());
        };
        let operation = if *way == "write" { IoOperation::Write } else { IoOperation::Read };
        let file = File::options().read(true).write(true).open(path)?;
        // SAFETY: the file is the benchmark's own; nothing shortens it while it is mapped.
        let mut pages = unsafe { MmapMut::map_mut(&file) }?;
        let range = AddressRange::new(pages.as_mut_ptr().expose_provenance(), pages.len());
        // SAFETY: mapped until `pages` goes, after the last transfer; for ever after an error.
        let mapped = unsafe { IoMemory::new(range) };
        // What the pinned pool does with its slabs. Where it is refused, transfers cost more.
        nvme.lend(&mapped);
        let (cpu, started) = (cpu_seconds(), Instant::now());
        if let Err(error) = move_all(&mut lanes, operation, *sums == "sums", mapped) {
            // Requests may still be on their way to the memory.
            std::mem::forget(pages);
            return Err(error.into());
        }
        let (seconds, cpu) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        nvme.take_back(&mapped);
        let bytes = usage.used_bytes;
        writeln!(out, r#"{{"bytes": {bytes}, "seconds": {seconds}, "cpu_seconds": {cpu}}}"#)?;
    }
    Ok(())
}

fn lane(nvme: &Nvme, config: &NvmeConfig) -> Result<Lane, NvmeError> {
    let regions = config.file_bytes as usize / REGION_BYTES / config.io_threads;
    let extents =
        (0..regions).map(|_| nvme.allocate(REGION_BYTES as u64)).collect::<Result<_, _>>()?;
    Ok(Lane { queue: nvme.take_queue(), extents })
}

fn move_all(
    lanes: &mut [Lane],
    operation: IoOperation,
    takes_sums: bool,
    memory: IoMemory,
) -> Result<(), NvmeError> {
    let pieces: Vec<IoMemory> = (0..memory.bytes() / REGION_BYTES)
        .map(|at| memory.part(at * REGION_BYTES, REGION_BYTES))
        .collect();
    let share = pieces.len() / lanes.len();
    thread::scope(|scope| {
        let threads: Vec<_> = lanes
            .iter_mut()
            .zip(pieces.chunks(share.max(1)))
            .map(|(lane, pieces)| scope.spawn(move || lane.run(operation, takes_sums, pieces)))
            .collect();
        threads.into_iter().try_for_each(|t| t.join().unwrap_or(Err(NvmeError::Cancelled)))
    })
}

/// CPU time of this process so far, the kernel's on its behalf included.
fn cpu_seconds() -> f64 {
    // SAFETY: rusage is plain data, for which zero is a value.
    let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
    // SAFETY: a live local of the type asked for. It cannot fail for this process.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
