//! The matrix, as `tests/deadlock/matrix.txt` has it.

const MATRIX: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/deadlock/matrix.txt"));

/// One word of each axis but the interface.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) memory: Memory,
    pub(super) copy: InFlight,
    pub(super) caller: Caller,
}

/// What there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Plenty,
    Full,
    NoHost,
    NoNvme,
    NoTier,
}

impl Memory {
    pub(super) const fn has_host(self) -> bool {
        matches!(self, Self::Plenty | Self::Full | Self::NoNvme)
    }

    pub(super) const fn has_nvme(self) -> bool {
        matches!(self, Self::Plenty | Self::Full | Self::NoHost)
    }
}

/// The copy of the region beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InFlight {
    Nothing,
    Out,
    In,
    Write,
}

/// Who makes the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    Plain,
    Lock,
}

/// The words after `key:`.
fn words(key: &str) -> Vec<&'static str> {
    let line = MATRIX.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no line {key:?}")).split_whitespace().collect()
}

fn memory(word: &str) -> Memory {
    match word {
        "plenty" => Memory::Plenty,
        "full" => Memory::Full,
        "no_host" => Memory::NoHost,
        "no_nvme" => Memory::NoNvme,
        "no_tier" => Memory::NoTier,
        other => panic!("memory: {other}"),
    }
}

fn in_flight(word: &str) -> InFlight {
    match word {
        "none" => InFlight::Nothing,
        "out" => InFlight::Out,
        "in" => InFlight::In,
        "write" => InFlight::Write,
        other => panic!("copy: {other}"),
    }
}

fn caller(word: &str) -> Caller {
    match word {
        "plain" => Caller::Plain,
        "lock" => Caller::Lock,
        other => panic!("caller: {other}"),
    }
}

/// The cells of `interface` that this suite runs; none where the suite does not run it.
pub(super) fn cells(suite: &str, interface: &str) -> Vec<Cell> {
    let run = words(&format!("run {suite}"));
    let at = run.iter().position(|&word| word == "/").unwrap();
    if !run[..at].contains(&interface) {
        return Vec::new();
    }
    let mut cells = Vec::new();
    for memory in words("memory").into_iter().map(memory) {
        for copy in words("copy").into_iter().map(in_flight) {
            for caller in run[at + 1..].iter().map(|word| caller(word)) {
                cells.push(Cell { memory, copy, caller });
            }
        }
    }
    cells
}

/// Whether the matrix has a reason why this suite has no cell of `interface`.
pub(super) fn is_impossible(suite: &str, interface: &str) -> bool {
    !words(&format!("impossible {suite} {interface}")).is_empty()
}

/// All interfaces of the matrix.
pub(super) fn interfaces() -> Vec<&'static str> {
    words("interface")
}
