//! The program in a shell: pipes, standard input, output files, several formats.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{Write as _, pipe};
use std::path::Path;
use std::process::Stdio;

use common::{Folder, dormouse, program};
use dormouse_cli::Report;

const LINES: &str = "{\"ids\": [1, 2, 3]}\n{\"ids\": [1, 2, 4]}\n";

fn example(here: &Folder) {
    here.put("shape.json", include_str!("../../examples/plan/shape.json"));
    here.put("config.json", include_str!("../../examples/plan/config.json"));
    here.put("machine.json", include_str!("../../examples/plan/machine.json"));
    here.put("sequences.jsonl", include_str!("../../examples/plan/sequences.jsonl"));
    here.put("lengths.jsonl", include_str!("../../examples/plan/lengths.jsonl"));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    for arguments in [&["plan", "batch.jsonl"][..], &["plan", "--help"], &["--help"]] {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let child =
            program(here.path()).args(arguments).stdout(writer).stderr(Stdio::piped()).spawn();
        let output = child.unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let child = program(here.path())
        .args(["plan", "batch.jsonl"])
        .stdout(full)
        .stderr(Stdio::piped())
        .spawn();
    let output = child.unwrap().wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("dormouse: standard output: "), "{said}");
}

#[test]
fn closed_standard_error_is_no_panic() {
    let here = Folder::new();
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let child = program(here.path()).args(["plan", "nowhere"]).stderr(writer).spawn();
    assert_eq!(child.unwrap().wait().unwrap().code(), Some(1));
}

#[test]
fn reads_a_file_from_standard_input() {
    let here = Folder::new();
    let path = here.put("batch.jsonl", LINES);
    let from_file = dormouse(here.path(), &["plan", "batch.jsonl"]);
    let input = fs::File::open(path).unwrap();
    let from_pipe = program(here.path()).args(["plan", "-"]).stdin(input).output().unwrap();
    assert!(from_file.status.success());
    assert_eq!(from_pipe.stdout, from_file.stdout);
}

/// Process substitution, `<(zcat file)`, gives a file that cannot be read twice.
#[test]
fn reads_a_named_pipe() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    let wanted = dormouse(here.path(), &["plan", "batch.jsonl"]);
    let mut child = program(here.path())
        .args(["plan", "/dev/stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(LINES.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, wanted.stdout);
}

/// Redirected standard input is seekable.
#[test]
fn reads_a_table_from_redirected_standard_input() {
    let here = Folder::new();
    let table = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata/snappy.parquet");
    let input = fs::File::open(table).unwrap();
    let output = program(here.path()).args(["plan", "-"]).stdin(input).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("sequences          3 in 2 groups\n"), "{text}");
}

#[test]
fn refuses_a_directory() {
    let here = Folder::new();
    let said = here.refusal(&["."]);
    assert!(said.starts_with("dormouse: .: Is a directory"), "{said}");
}

/// An unset shell variable gives an empty argument, which must not mean the current directory.
#[test]
fn refuses_an_empty_name() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    for (arguments, wanted) in [
        (
            &["plan", "batch.jsonl", "-m", "llama3-8b", "-o", ""][..],
            "a value is required for '--out <DIR>'",
        ),
        (&["plan", "batch.jsonl", "-m", ""], "a value is required for '--model <NAME|FILE>'"),
        (
            &["plan", "batch.jsonl", "-m", "llama3-8b", "-M", ""],
            "a value is required for '--machine <FILE>'",
        ),
        (&["plan", ""], "a value is required for '<FILE>...'"),
    ] {
        let output = dormouse(here.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.starts_with(&format!("dormouse: {wanted}")), "{said}");
    }
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1, "nothing was written");
}

/// Control characters of a file are escaped and long values truncated.
#[test]
fn an_error_is_one_bounded_line() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    let field = format!("{{\"\\u001b[2Jlong{}\": 1}}", "g".repeat(100_000));
    here.put("machine.json", field);
    let said = here.refusal(&["batch.jsonl", "-m", "llama3-8b", "-M", "machine.json"]);
    assert!(said.starts_with("dormouse: machine.json has unknown field \\u{1b}[2Jlongg"), "{said}");
    assert!(said.ends_with("…\n") && said.chars().count() < 2100, "{}", said.len());
    assert_eq!(said.lines().count(), 1);
}

/// Only the first bytes are read before the refusal.
#[test]
fn refuses_formats_with_a_footer_from_a_pipe() {
    let here = Folder::new();
    for (head, name) in [(&b"PAR1...."[..], "a Parquet file"), (b"ARROW1..", "an Arrow file")] {
        let mut child = program(here.path())
            .args(["plan", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // One byte at a time: a read from a pipe may return fewer bytes than requested.
        let mut input = child.stdin.take().unwrap();
        head.iter().for_each(|byte| input.write_all(&[*byte]).unwrap());
        drop(input);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let wanted = format!(
            "dormouse: standard input is {name}; accepted from a pipe: JSON lines, an Arrow stream\n"
        );
        assert_eq!(String::from_utf8_lossy(&output.stderr), wanted);
    }
}

#[test]
fn files_are_one_batch() {
    let here = Folder::new();
    here.put("one.jsonl", "{\"ids\": [1, 2, 3]}\n");
    here.put("two.jsonl", "{\"ids\": [1, 2, 4]}\n");
    here.put("both.jsonl", LINES);
    assert_eq!(here.report(&["one.jsonl", "two.jsonl"]), here.report(&["both.jsonl"]));
    here.put("three.jsonl", "{\"length\": 3}\n");
    let said = here.refusal(&["one.jsonl", "three.jsonl"]);
    assert!(said.starts_with("dormouse: three.jsonl, line 1: length is 3;"), "{said}");
}

#[test]
fn lengths_and_ids_of_the_same_groups_are_the_same_plan() {
    let here = Folder::new();
    example(&here);
    let response = |group: usize, index: usize| -> Vec<usize> {
        // Each response has a different first token, so only the prompt is shared.
        (0..5 + index).map(|at| 10 + 40 * group + 10 * index + at).collect()
    };
    let (mut of_ids, mut of_lengths) = (String::new(), String::new());
    for group in 0..2 {
        let prompt: Vec<usize> = (0..8 + group).map(|at| 1 + group + at % 3).collect();
        for index in 0..3 {
            let response = response(group, index);
            let tokens = prompt.len() + response.len();
            of_ids += &serde_json::json!({
                "prompt_ids": prompt, "response_ids": response, "group": group, "weight": 0.5,
            })
            .to_string();
            of_lengths += &serde_json::json!({
                "length": tokens, "prompt_length": prompt.len(), "group": group, "weight": 0.5,
            })
            .to_string();
            of_ids += "\n";
            of_lengths += "\n";
        }
    }
    here.put("ids.jsonl", of_ids);
    here.put("lengths.jsonl", of_lengths);
    let rest = ["-m", "config.json", "-M", "machine.json", "-b", "8", "-r", "3", "-s", "2"];
    let report = |file| here.report(&[&[file][..], &rest].concat());
    let report_of_ids = report("ids.jsonl");
    assert_eq!(report_of_ids, report("lengths.jsonl"));
    assert_eq!((report_of_ids.batch.trees, report_of_ids.batch.nodes), (2, 8));
}

#[test]
fn writes_the_output_files() {
    let here = Folder::new();
    example(&here);
    let out = |arguments: &[&str]| {
        let all =
            [&["lengths.jsonl", "-m", "config.json", "--out", "deep/er"][..], arguments].concat();
        let report = here.report(&all);
        let folder = here.path().join("deep/er");
        let written: Report =
            serde_json::from_slice(&fs::read(folder.join("report.json")).unwrap()).unwrap();
        assert_eq!(written, report);
        let mut names: Vec<String> = fs::read_dir(&folder)
            .unwrap()
            .map(|it| it.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let texts = names.iter().map(|name| fs::read_to_string(folder.join(name)).unwrap());
        let texts: Vec<String> = texts.collect();
        fs::remove_dir_all(&folder).unwrap();
        (names, texts)
    };
    let (names, texts) = out(&[]);
    assert_eq!(names, ["page.html", "plan.json", "report.json"]);
    assert!(texts[0].contains("<th>batch: compression</th><td>3.846</td>"), "{}", texts[0]);
    assert!(!texts[0].contains("<svg"), "no picture without known times");

    let arguments = ["plan", "lengths.jsonl", "-m", "config.json", "--out", "deep/er"];
    let said = String::from_utf8(dormouse(here.path(), &arguments).stdout).unwrap();
    let wanted = "\nwrote deep/er\nnext: open deep/er/page.html in a browser\n";
    assert!(said.ends_with(wanted), "{said}");

    let (names, texts) = out(&["-M", "machine.json", "-b", "2048", "-r", "2", "-s", "3"]);
    let wanted = [
        "memory.svg",
        "page.html",
        "plan.json",
        "report.json",
        "shares.json",
        "stages.html",
        "stages.json",
        "stages.svg",
    ];
    assert_eq!(names, wanted);
    let json = |at: usize| serde_json::from_str::<serde_json::Value>(&texts[at]).unwrap();
    let (plan, report) = (json(2), json(3));
    let ops = plan["ops"].as_array().unwrap();
    let microbatches = ops.iter().filter(|op| op["kind"] == "microbatch").count();
    assert_eq!(report["plan"]["ops"]["microbatches"], microbatches);
    assert!(microbatches > 8, "{microbatches} microbatches of 2048 rows");
    assert_eq!(json(4)["shares"].as_array().unwrap().len(), 2);
    assert_eq!(json(6)["stages"].as_array().unwrap().len(), 3);
    assert_eq!(texts[1].matches("<svg").count(), 2, "memory and stages");
    assert!(texts[0].starts_with("<svg") && texts[7].starts_with("<svg"));
    assert!(texts[7].matches("stage ").count() >= 3);
}

#[test]
fn refuses_a_description_that_is_too_long() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    here.put("model.json", vec![b' '; (1 << 20) + 1]);
    let said = here.refusal(&["batch.jsonl", "-m", "model.json"]);
    assert_eq!(said, "dormouse: model.json is longer than 1048576 bytes; accepted: at most that\n");
    // A device file without end, and a folder.
    let said = here.refusal(&["batch.jsonl", "-m", "/dev/zero"]);
    assert_eq!(said, "dormouse: /dev/zero is longer than 1048576 bytes; accepted: at most that\n");
    let said = here.refusal(&["batch.jsonl", "-m", "."]);
    assert!(said.starts_with("dormouse: .: Is a directory"), "{said}");
}

#[test]
fn an_error_names_the_output_directory() {
    let here = Folder::new();
    example(&here);
    here.put("taken", "a file");
    let said = here.refusal(&["sequences.jsonl", "-m", "shape.json", "-o", "taken"]);
    assert!(said.starts_with("dormouse: taken: "), "{said}");
}

#[test]
fn a_report_survives_a_round_trip() {
    let here = Folder::new();
    example(&here);
    let arguments =
        ["lengths.jsonl", "-m", "llama3-8b", "-M", "machine.json", "-r", "2", "-s", "2"];
    let report = here.report(&arguments);
    let again: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    assert_eq!(again, report);
    assert!(report.plan.is_some() && report.ranks.is_some() && report.pipeline.is_some());
    assert_eq!(report.model.unwrap().name, "llama3-8b");
}

#[test]
fn equal_runs_print_equal_bytes() {
    let here = Folder::new();
    example(&here);
    let arguments = [
        "plan",
        "sequences.jsonl",
        "-m",
        "shape.json",
        "-M",
        "machine.json",
        "-j",
        "-r",
        "2",
        "-s",
        "2",
    ];
    let once = dormouse(here.path(), &arguments);
    assert!(once.status.success());
    assert_eq!(dormouse(here.path(), &arguments).stdout, once.stdout);
}
