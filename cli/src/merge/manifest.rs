//! The manifest of an archive of traces, as Perfetto's viewer reads it.

use serde_json::{Value, json};

use super::{Kind, Trace};

/// Its name in the archive.
pub(super) const NAME: &str = "perfetto_manifest.json";

/// Returns the manifest: Unix time is the axis, and each Kineto trace counts from its base on the first dump's clock.
pub(super) fn of(traces: &[Trace]) -> String {
    let dump =
        traces.iter().find(|trace| trace.kind == Kind::Dump).map(|trace| trace.entry.as_str());
    let file = |trace: &Trace| -> Value {
        match trace.kind {
            Kind::Dump => json!({"path": trace.entry}),
            Kind::Kineto => json!({
                "path": trace.entry,
                "clocks": {
                    "sync_to": {"file": dump, "clock": "REALTIME"},
                    "offset_ns": trace.offset_ns,
                },
            }),
        }
    };
    let files: Vec<Value> = traces.iter().map(file).collect();
    let manifest = json!({"perfetto_manifest": {
        "version": 1,
        "trace_time": {"clock": "REALTIME"},
        "files": files,
    }});
    format!("{manifest:#}\n")
}
