//! Pictures match the recordings, are well formed, and contain no scripts or links.

use std::fs;
use std::path::Path;

use dormouse_parallel::draw::*;
use dormouse_parallel::pipeline::*;
use dormouse_parallel::simulate::{SimulatedRank, SimulatedStep, World};

fn pipeline(groups: usize) -> Pipeline {
    let microbatch = PipelineMicrobatch { rows: 3, forward_ns: 100, backward_ns: 200 };
    let share = |linear_ns| StageShare { linear_ns, pairs_ns: 0 };
    let group = PipelineGroup {
        prefix_rows: 8,
        forward: share(150),
        backward: share(300),
        microbatches: vec![microbatch],
    };
    Pipeline {
        stages: 2,
        virtual_stages: 1,
        groups: vec![group; groups],
        chunks: 1,
        row_bytes: RowBytes {
            activation: 0,
            boundary: 100,
            prefix_saved: 924,
            microbatch_saved: 2048,
        },
        ..Pipeline::default()
    }
}

/// The picture without its style, which would clutter a diff.
fn drawn(svg: &str) -> String {
    let (head, rest) = svg.split_once("<style>").unwrap();
    let (_, tail) = rest.split_once("</style>\n").unwrap();
    format!("{head}{tail}")
}

fn as_recorded(file: &str, got: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata/draw").join(file);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, got).unwrap();
    }
    assert_eq!(got, fs::read_to_string(&path).unwrap(), "{}", path.display());
}

/// Elements are closed in order; the text between them has no unescaped `<` or `&`.
fn well_formed(text: &str) {
    const VOID: [&str; 1] = ["meta"];
    let mut open: Vec<&str> = Vec::new();
    let mut rest = text.strip_prefix("<!doctype html>").unwrap_or(text);
    while let Some((between, tail)) = rest.split_once('<') {
        for entity in between.split('&').skip(1) {
            let known = ["amp;", "lt;", "gt;", "quot;", "#39;"];
            assert!(known.iter().any(|name| entity.starts_with(name)), "bare & in {between:?}");
        }
        let (tag, tail) = tail.split_once('>').unwrap();
        rest = tail;
        let name = tag.split([' ', '/']).find(|word| !word.is_empty()).unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "closed out of order");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
}

#[test]
fn pictures_match_the_recordings() {
    let case = pipeline(1);
    let stages = case.plan().unwrap();
    let times = stages.times(&case, TransferTiming::Overlapped).unwrap();
    as_recorded("stages.svg", &drawn(&stages_svg(&stages, &times)));
    let series = [
        Series { name: "device".to_owned(), points: vec![(0, 1024), (400, 4096), (900, 0)] },
        Series { name: "host".to_owned(), points: vec![(500, 2048)] },
    ];
    as_recorded("memory.svg", &drawn(&memory_svg(&series, 1000)));
    let world = World::of_stages(&case, &stages).unwrap();
    as_recorded("rank.svg", &drawn(&rank_svg(&world.run().unwrap().ranks[1])));
}

#[test]
fn a_page_is_self_contained_and_has_no_scripts() {
    let case = Pipeline { chunks: 2, ..pipeline(3) };
    let stages = case.plan().unwrap();
    let page = pipeline_page("</title><script>alert('1')</script>", &case, &stages).unwrap();
    well_formed(&page);
    let script = page.to_lowercase().contains("<script");
    assert!(!script, "a title became an element");
    assert!(page.contains("&lt;/title&gt;&lt;script&gt;alert(&#39;1&#39;)"));
    assert!(page.contains("default-src 'none'"));
    let without_namespace = page.replace("http://www.w3.org/2000/svg", "");
    for fetched in ["://", "src=", "href", "@import", "url(h"] {
        assert!(!without_namespace.contains(fetched), "{fetched}");
    }
    assert_eq!(page.matches("<svg").count(), 2, "ops and bytes");
    // 3 groups × 2 stages × (2 + 2 chunks, 1 + 1 microbatches), each with a tooltip.
    assert_eq!(page.matches(" rows: ").count(), 36);
    assert!(page.contains(&format!("<td>{:.1} %</td>", 100.0 * stages.report.bubble)));
    assert!(page.contains("<th>stage 1, peak</th><td>"));
    let mut broken = stages;
    broken.stages[0].ops.pop();
    assert!(pipeline_page("", &case, &broken).is_err());
}

#[test]
fn a_picture_counts_omitted_bars() {
    let steps = vec![SimulatedStep { compute_ns: 1, ..SimulatedStep::default() }; BARS_MAX];
    let world = World {
        ranks: vec![SimulatedRank { steps, ..SimulatedRank::default() }],
        ..World::default()
    };
    let svg = rank_svg(&world.run().unwrap().ranks[0]);
    well_formed(&svg);
    // Five rows share the bars.
    let share = BARS_MAX / 5;
    assert!(svg.contains(&format!("{share} of {BARS_MAX} bars drawn")));
    assert_eq!(svg.matches("<title>step ").count(), share);
    assert_eq!(svg.matches("class=\"omitted\"").count(), 1, "what is left out is not idle");
    let points = |count: usize| (0..count as u64).map(|at| (at, at % 7)).collect();
    let series = |name: &str, count| Series { name: name.to_owned(), points: points(count) };
    let half = BARS_MAX / 2;
    let svg = memory_svg(&[series("short", half), series("long", half + 3)], BARS_MAX as u64);
    well_formed(&svg);
    assert_eq!(svg.matches(" points drawn").count(), 1);
    assert!(svg.contains(&format!("{half} of {} points drawn", half + 3)));
}

/// A file may contain bars that end before they start; they are drawn with no width.
#[test]
fn draws_times_that_decrease() {
    let case = pipeline(1);
    let stages = case.plan().unwrap();
    let mut times = stages.times(&case, TransferTiming::Overlapped).unwrap();
    (times.ops[0][0].start_ns, times.ops[0][0].end_ns) = (500, 100);
    well_formed(&stages_svg(&stages, &times));
    let world = World::of_stages(&case, &stages).unwrap();
    let mut rank = world.run().unwrap().ranks.remove(0);
    (rank.steps[0].reached_ns, rank.steps[0].start_ns) = (700, 600);
    well_formed(&rank_svg(&rank));
}

#[test]
fn empty_input_gives_empty_pictures() {
    well_formed(&memory_svg(&[], 0));
    well_formed(&rank_svg(&Default::default()));
    well_formed(&page("", &[], &[]));
}
