//! A prefix's report as text: the phase with the peak, bytes per tier, stall time against its bound, the
//! accesses to sleeping memory, and the reasons that memory stayed awake.

use std::fmt;

use super::report::PrefixReport;

/// Layers whose stalls are listed, the longest first.
const LAYERS_LISTED_MAX: usize = 4;

impl fmt::Display for PrefixReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dormant, boundary) = (Bytes(self.dormant_bytes), Bytes(self.boundary_bytes));
        let sums = Bytes(self.accumulator_bytes);
        let layers = self.layers;
        writeln!(f, "{layers} layers: {dormant} dormant, {boundary} boundary, {sums} gradients")?;
        self.write_peak(f)?;
        let (most, host) = (Bytes(self.asleep_bytes_peak), Bytes(self.host_bytes_peak));
        writeln!(f, "asleep: {most} at most; host {host}, file {}", Bytes(self.nvme_bytes_peak))?;
        if let Some(planned) = self.planned {
            let (kept, host) = (Bytes(planned.kept_bytes), Bytes(planned.host_bytes));
            let (file, wait) = (Bytes(planned.nvme_bytes), Time(planned.stall_ns));
            writeln!(
                f,
                "planned: {kept} awake, {host} in host memory, {file} in the file, {wait} stall"
            )?;
        }
        self.write_links(f)?;
        self.write_stalls(f)?;
        if self.left_asleep_bytes > 0 {
            writeln!(f, "left asleep: {}; the wake failed", Bytes(self.left_asleep_bytes))?;
        }
        if let Some(first) = &self.stray.first {
            let count = self.stray.count;
            writeln!(f, "stray: {count} wakes by accesses to sleeping memory; the first: {first}")?;
        }
        self.declined.iter().try_for_each(|why| writeln!(f, "awake: {why}"))
    }
}

impl PrefixReport {
    fn write_peak(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(phase) = self.peak_phase else {
            return writeln!(f, "peak: no phase was entered");
        };
        let [a, b, c] = self.phase_peak_bytes.map(Bytes);
        writeln!(f, "peak: phase {phase:?} (A {a}, B {b}, C {c})")
    }

    fn write_links(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (out, back) = (Bytes(self.written_bytes), Bytes(self.read_bytes));
        let (wrote, read) = (Bytes(self.write_bytes_per_s), Bytes(self.read_bytes_per_s));
        writeln!(f, "file: {out} written at {wrote}/s, {back} read at {read}/s")?;
        let rates = &self.link_rates;
        let out = Bytes(rates.device_to_host_bytes_per_s);
        writeln!(f, "host: {out}/s out, {}/s in", Bytes(rates.host_to_device_bytes_per_s))
    }

    fn write_stalls(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waited, bound) = (Time(self.stall_ns), Time(self.stall_bound_ns));
        write!(
            f,
            "stalled: {waited}; {bound} bound at the best rates seen, with unlimited memory"
        )?;
        if self.stall_bound_ns > 0 {
            write!(f, " ({:.2} x)", self.stall_ns as f64 / self.stall_bound_ns as f64)?;
        }
        let mut waits: Vec<(u64, usize)> =
            self.layer.iter().enumerate().map(|(at, layer)| (layer.stall_ns, at)).collect();
        waits.retain(|&(ns, _)| ns > 0);
        waits.sort_unstable_by(|a, b| b.cmp(a));
        for (ns, layer) in waits.into_iter().take(LAYERS_LISTED_MAX) {
            write!(f, "; layer {layer} {}", Time(ns))?;
        }
        writeln!(f)
    }
}

/// Bytes in the unit that suits them.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        match units.into_iter().find(|&(_, unit)| self.0 >= unit) {
            Some((name, unit)) => write!(f, "{:.1} {name}", self.0 as f64 / unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// Nanoseconds as milliseconds.
struct Time(u64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} ms", self.0 as f64 / 1e6)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::{LayerReport, Phase, Planned};
    use super::*;
    use crate::engine::{StrayAccess, StrayWakes};
    use crate::ids::label;
    use dormouse_residency::LinkRates;

    #[test]
    fn a_report_is_formatted_as_text() {
        let layer = |stall_ns| LayerReport { stall_ns, ..LayerReport::default() };
        let report = PrefixReport {
            layers: 3,
            dormant_bytes: 3 << 30,
            boundary_bytes: 5 << 20,
            accumulator_bytes: 10 << 20,
            asleep_bytes_peak: 2 << 30,
            host_bytes_peak: 1 << 30,
            nvme_bytes_peak: 1 << 30,
            written_bytes: 1 << 30,
            read_bytes: 1 << 30,
            write_bytes_per_s: 512 << 20,
            read_bytes_per_s: 3 << 29,
            link_rates: LinkRates {
                device_to_host_bytes_per_s: 20 << 30,
                host_to_device_bytes_per_s: 24 << 30,
                ..LinkRates::default()
            },
            stall_ns: 4_500_000,
            stall_bound_ns: 3_000_000,
            planned: Some(Planned {
                kept_bytes: 1 << 30,
                host_bytes: 1 << 30,
                nvme_bytes: 1 << 30,
                stall_ns: 4_000_000,
            }),
            layer: vec![layer(0), layer(1_500_000), layer(3_000_000)],
            declined: vec!["the disk is full".to_owned()],
            peak_phase: Some(Phase::B),
            phase_peak_bytes: [4 << 30, 5 << 30, 900],
            left_asleep_bytes: 4096,
            stray: StrayWakes {
                count: 3,
                first: Some(StrayAccess {
                    address: 0x7f00_dead_b000,
                    access: "read",
                    thread: 12,
                    label: label("step", Some(1)),
                }),
            },
            ..PrefixReport::default()
        };
        let page = "\
3 layers: 3.0 GiB dormant, 5.0 MiB boundary, 10.0 MiB gradients
peak: phase B (A 4.0 GiB, B 5.0 GiB, C 900 B)
asleep: 2.0 GiB at most; host 1.0 GiB, file 1.0 GiB
planned: 1.0 GiB awake, 1.0 GiB in host memory, 1.0 GiB in the file, 4.000 ms stall
file: 1.0 GiB written at 512.0 MiB/s, 1.0 GiB read at 1.5 GiB/s
host: 20.0 GiB/s out, 24.0 GiB/s in
stalled: 4.500 ms; 3.000 ms bound at the best rates seen, with unlimited memory (1.50 x); layer 2 3.000 ms; layer 1 1.500 ms
left asleep: 4.0 KiB; the wake failed
stray: 3 wakes by accesses to sleeping memory; the first: read of 0x7f00deadb000 by thread 12 in layer 1 of \"step\"
awake: the disk is full
";
        assert_eq!(report.to_string(), page);
    }

    #[test]
    fn unknown_figures_are_left_out_of_the_report() {
        let page = PrefixReport::default().to_string();
        assert!(page.contains("no phase was entered"), "{page}");
        assert!(!page.contains("planned") && !page.contains(" x)"), "{page}");
    }
}
