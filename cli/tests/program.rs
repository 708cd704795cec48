//! The program in a shell: pipes, standard input, output files, several formats.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{Write as _, pipe};
use std::path::Path;
use std::process::Stdio;

use common::{Folder, dormouse, program};
use dormouse_cli::Report;
use dormouse_schedule::{PlanFile, SequenceName};

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
    assert!(text.contains("sequences         3 in 2 groups, at most 3 tokens\n"), "{text}");
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
            "dormouse: standard input is {name}; accepted from a pipe: JSON lines (also gzip), an Arrow stream\n"
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
    assert_eq!(names, ["page.html", "plan.json", "rank-0.plan", "report.json"]);
    let tokens = "<th>Batch: tokens</th><td>143,027 of sequences, 37,187 of trees: 3.846 to 1</td>";
    assert!(texts[0].contains(tokens), "{}", texts[0]);
    assert!(texts[0].contains("<pre>7,800 tokens, 8 sequences\n└─ 8 leaves of "), "{}", texts[0]);
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
        "rank-0.plan",
        "rank-1.plan",
        "report.json",
        "shares.json",
        "stages.html",
        "stages.json",
        "stages.svg",
    ];
    assert_eq!(names, wanted);
    let json = |at: usize| serde_json::from_str::<serde_json::Value>(&texts[at]).unwrap();
    let (plan, report) = (json(2), json(5));
    let ops = plan["ops"].as_array().unwrap();
    let microbatches = ops.iter().filter(|op| op["kind"] == "microbatch").count();
    assert_eq!(report["plan"]["ops"]["microbatches"], microbatches);
    assert!(microbatches > 8, "{microbatches} microbatches of 2048 rows");
    assert_eq!(json(6)["shares"].as_array().unwrap().len(), 2);
    assert_eq!(json(8)["stages"].as_array().unwrap().len(), 3);
    assert_eq!(texts[1].matches("<svg").count(), 2, "memory and stages");
    assert!(texts[0].starts_with("<svg") && texts[9].starts_with("<svg"));
    assert!(texts[9].matches("stage ").count() >= 3);
}

/// A rank would take the plan of an earlier batch for its own. All other files stay, also of names that runs write.
#[test]
fn plans_of_an_earlier_run_are_removed() {
    let here = Folder::new();
    example(&here);
    let names = || {
        let entries = fs::read_dir(here.path().join("out")).unwrap();
        let mut names: Vec<String> =
            entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let shared = ["plan", "lengths.jsonl", "-m", "config.json", "-o", "out"];
    let run = |more: &[&str]| {
        let output = dormouse(here.path(), &[&shared[..], more].concat());
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    fs::create_dir(here.path().join("out")).unwrap();
    let foreign = [
        "memory.svg",
        "notes.txt",
        "rank-.plan",
        "rank-02.plan",
        "rank-7.plan.bak",
        "rank-x.plan",
        "stages.json",
    ];
    for name in foreign {
        here.put(&format!("out/{name}"), "another's");
    }
    fs::create_dir(here.path().join("out/rank-9.plan")).unwrap();
    run(&["-r", "4"]);
    assert!(names().iter().any(|name| name == "rank-3.plan"), "{:?}", names());
    here.put("out/rank-7.plan", "of a run with more ranks");
    let said = run(&["-r", "2"]);
    let removed = ["rank-2.plan", "rank-3.plan", "rank-7.plan"]
        .map(|name| format!("removed out/{name} of an earlier run\n"));
    let wanted =
        format!("\nwrote out\n{}next: open out/page.html in a browser\n", removed.concat());
    assert!(said.ends_with(&wanted), "{said}");
    let ours =
        ["page.html", "plan.json", "rank-0.plan", "rank-1.plan", "report.json", "shares.json"];
    let mut wanted = [&ours[..], &foreign, &["rank-9.plan"]].concat();
    wanted.sort_unstable();
    assert_eq!(names(), wanted);
    for name in foreign {
        let text = fs::read_to_string(here.path().join("out").join(name)).unwrap();
        assert_eq!(text, "another's", "{name}");
    }
    run(&[]);
    wanted.retain(|name| *name != "rank-1.plan");
    assert_eq!(names(), wanted);
}

/// Each rank has its sequences, with the user's names and the checksums of their tokens.
#[test]
fn plan_files_have_all_sequences_once() {
    let here = Folder::new();
    example(&here);
    let line = |name: &str, ids: &[i32]| format!("{{\"uid\": {name}, \"ids\": {ids:?}}}\n");
    let ids: Vec<Vec<i32>> = (0..7).map(|at| vec![1, 2, 3, 4 + at / 3, 10 + at]).collect();
    let names = (0..7).map(|at| if at % 2 == 0 { format!("{at}") } else { format!("\"s{at}\"") });
    let lines: String = names.zip(&ids).map(|(name, ids)| line(&name, ids)).collect();
    here.put("batch.jsonl", lines);
    let shared = ["batch.jsonl", "-m", "shape.json", "--id-column", "uid", "-o", "out"];
    for (ranks, most) in [("1", 1), ("3", 3), ("9", 7)] {
        here.report(&[&shared[..], &["-r", ranks]].concat());
        let mut seen = Vec::new();
        let mut files = 0;
        for rank in 0..9_u32 {
            let path = here.path().join(format!("out/rank-{rank}.plan"));
            let Ok(text) = fs::read_to_string(&path) else { continue };
            fs::remove_file(path).unwrap();
            let file = PlanFile::parse(&text).unwrap();
            assert_eq!((file.rank, file.ranks.to_string()), (rank, ranks.to_owned()));
            files += 1;
            for sequence in file.sequences {
                let at = sequence.number as usize;
                let name = match at % 2 {
                    0 => SequenceName::Number(at as i64),
                    _ => SequenceName::Text(format!("s{at}")),
                };
                let bytes: Vec<u8> = ids[at].iter().flat_map(|id| id.to_le_bytes()).collect();
                assert_eq!(sequence.name, Some(name));
                assert_eq!(sequence.crc32, Some(crc32fast::hash(&bytes)));
                assert_eq!(sequence.tokens, ids[at].len() as u64);
                seen.push(at);
            }
        }
        seen.sort();
        assert_eq!(seen, (0..7).collect::<Vec<_>>(), "{ranks} ranks");
        assert!((1..=most).contains(&files), "{ranks} ranks, {files} files");
    }
}

fn gzipped(text: &[u8]) -> Vec<u8> {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text).unwrap();
    gzip.finish().unwrap()
}

#[test]
fn lines_may_be_gzip() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    let wanted = here.report(&["batch.jsonl"]);
    // Whatever its name; one member or several.
    here.put("batch", gzipped(LINES.as_bytes()));
    assert_eq!(here.report(&["batch"]), wanted);
    let (first, second) = LINES.as_bytes().split_at(25);
    let members = [gzipped(first), gzipped(second)].concat();
    here.put("members.gz", &members);
    assert_eq!(here.report(&["members.gz"]), wanted);
    let mut child = program(here.path())
        .args(["plan", "-j", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&members).unwrap();
    let piped: Report = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(piped, wanted);
    for (file, bytes, words) in [
        ("cut.gz", &members[..members.len() - 3], "cut.gz: "),
        ("head.gz", &members[..9], "head.gz: "),
        ("table.gz", &gzipped(b"PAR1...."), "table.gz is gzip of a Parquet file; accepted: "),
        ("twice.gz", &gzipped(&members), "twice.gz is gzip of compressed again; accepted: "),
        ("none.gz", &gzipped(b""), "none.gz has no sequences; accepted: 1 or more"),
        ("text.gz", &gzipped(b"id,token"), "text.gz begins with `id,token`; accepted: "),
    ] {
        here.put(file, bytes);
        let said = here.refusal(&[file]);
        assert!(said.starts_with(&format!("dormouse: {words}")), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let mut damaged = members.clone();
    damaged[20] ^= 0x55;
    here.put("damaged.gz", damaged);
    let said = here.refusal(&["damaged.gz"]);
    assert!(said.starts_with("dormouse: damaged.gz") && said.lines().count() == 1, "{said}");
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

/// A float with an integral value is that integer, as far as 64 bits reach.
#[test]
fn rates_may_be_floats_with_integral_values() {
    let here = Folder::new();
    here.put("batch.jsonl", LINES);
    let arguments = ["batch.jsonl", "-m", "llama3-8b", "-M", "mine.json"];
    for (text, rate) in [
        ("4e14", 400_000_000_000_000),
        ("1e16", 10_000_000_000_000_000),
        ("1.8446744073709550e19", 18_446_744_073_709_549_568),
    ] {
        here.put("mine.json", format!("{{\"flops_per_s\": {text}}}"));
        assert_eq!(here.report(&arguments).machine.unwrap().flops_per_s, rate);
    }
    for text in ["1.8446744073709552e19", "1e20", "-1e16", "1.5"] {
        here.put("mine.json", format!("{{\"flops_per_s\": {text}}}"));
        let said = here.refusal(&arguments);
        assert!(said.ends_with("; accepted: integers, 0 to 18446744073709551615\n"), "{said}");
    }
}

/// Sequences that score as many rows cost as much, whether they are trees of their own or leaves of one.
#[test]
fn ranks_weigh_the_rows_that_are_scored() {
    let here = Folder::new();
    let roots = "{\"length\": 1001, \"group\": 0}\n".repeat(20);
    let leaves = "{\"length\": 1001, \"prompt_length\": 1, \"group\": 1}\n".repeat(20);
    here.put("batch.jsonl", roots + &leaves);
    here.put("machine.json", "{\"flops_per_s\": 4e14}");
    let arguments = ["batch.jsonl", "-m", "llama3-8b", "-M", "machine.json", "-r", "2"];
    let ranks = here.report(&arguments).ranks.unwrap().ranks;
    assert_eq!([ranks[0].sequences, ranks[1].sequences], [20, 20]);
    assert_eq!([ranks[0].of_even, ranks[1].of_even], [1.0, 1.0]);
    assert_eq!(ranks[0].busy_s, ranks[1].busy_s);
    // A root of 1,000 rows that scores one of them weighs less than one that scores all.
    let one = "{\"length\": 1001, \"loss\": 1000}\n".repeat(20);
    here.put("batch.jsonl", one + &"{\"length\": 1001}\n".repeat(20));
    let ranks = here.report(&arguments).ranks.unwrap().ranks;
    assert_eq!([ranks[0].sequences, ranks[1].sequences], [21, 19]);
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

/// A `.safetensors` file with this header.
fn safetensors(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}

/// Without a dtype in its configuration transformers takes that of the first tensor of a floating type, by name, of the
/// first shard.
#[test]
fn a_missing_dtype_is_that_of_the_weights() {
    let here = Folder::new();
    example(&here);
    here.put(
        "config.json",
        r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 65536}"#,
    );
    let arguments = ["lengths.jsonl", "-m", "config.json"];
    let seen = || {
        let model = here.report(&arguments).model.unwrap();
        (model.shape.dtype_bytes, model.assumed_dtype)
    };
    let assumed = (4, Some("float32".to_owned()));
    assert_eq!(seen(), assumed);
    // Only the index was downloaded, then the shards.
    here.put(
        "model.safetensors.index.json",
        r#"{"metadata": {}, "weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"}}"#,
    );
    assert_eq!(seen(), assumed);
    here.put("model-2.safetensors", safetensors(r#"{"a": {"dtype": "F32"}}"#));
    here.put("model-1.safetensors", safetensors(r#"{"b": {"dtype": "F64"}}"#));
    assert_eq!(seen(), (8, None));
    for (header, wanted) in [
        (
            r#"{"__metadata__": {"format": "pt"}, "a": {"dtype": "U8"}, "c": {"dtype": "F32"},
                "b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}"#,
            (2, None),
        ),
        (r#"{"a": {"dtype": "F8_E4M3"}, "b": {"dtype": "F16"}}"#, (2, None)),
        (r#"{"a": {"dtype": "I64"}}"#, assumed),
    ] {
        here.put("model.safetensors", safetensors(header));
        assert_eq!(seen(), wanted, "{header}");
    }
    let otherwise = "or a dtype in the config.json\n";
    for (bytes, wanted) in [
        (
            &b"version https://git-lfs.github.com/spec/v1\n"[..],
            "the length of its header is 2336927755350992246; accepted: at most 33554432 bytes, ",
        ),
        (b"\0\0", "failed to fill whole buffer; accepted: the weights of the config.json, "),
        (
            &safetensors("{}")[..9],
            "EOF while parsing an object at line 1 column 1; accepted: the header of a .safetensors file, ",
        ),
    ] {
        here.put("model.safetensors", bytes);
        assert_eq!(
            here.refusal(&arguments),
            format!("dormouse: model.safetensors: {wanted}{otherwise}")
        );
    }
}
