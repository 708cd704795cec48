//! The trainer in C (`examples/c/trainer`): two pipeline stages in two processes, and altered copies of it, whose
//! own checks must notice.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Ended, Links, clean, compile_all, folder, root, run};

/// Exit codes of `check.h`.
const PEER: i32 = 1;
const LIBRARY: i32 = 3;
const WRONG: i32 = 4;
const ASKED: i32 = 5;

const SOURCES: [&str; 5] = ["trainer.c", "stage.c", "stage_list.c", "group.c", "model.c"];
const HEADERS: [&str; 5] = ["check.h", "stage.h", "stage_list.h", "group.h", "model.h"];

fn example() -> PathBuf {
    root().join("examples/c/trainer")
}

fn compiled(sources: &Path, into: &Path) -> PathBuf {
    compile_all(&SOURCES.map(|name| sources.join(name)), into, Links::Library)
}

#[test]
fn two_stages_agree_with_the_dense_run() {
    let dir = folder("trainer");
    let program = compiled(&example(), &dir);
    run(clean(&program).arg(&dir))
        .well()
        .says("stage 0: sent 34560 bytes as planned")
        .says("stage 1: sent 34560 bytes as planned")
        .says("both stages agree with the dense run");
    let nowhere = run(&mut clean(&program));
    assert_eq!(nowhere.code, Some(2), "{}", nowhere.err);
    nowhere.complains("usage");
}

/// Its closed socket does; else the message would be of a silent stage, a minute later.
#[test]
fn an_error_in_a_stage_ends_the_other() {
    let dir = folder("trainer-error");
    let program = compiled(&example(), &dir);
    for failing in [0, 1] {
        let ended = run(clean(&program).arg(&dir).arg(failing.to_string()));
        assert_eq!(ended.code, Some(ASKED), "{}", ended.err);
        ended.complains(&format!("stage {failing}: fails as asked"));
        ended.complains(&format!("stage {}: the other stage ended", 1 - failing));
    }
}

/// A copy of the trainer in which each first text is the second; without a second, its line is left out.
struct Altered {
    test: &'static str,
    file: &'static str,
    texts: &'static [(&'static str, &'static str)],
    code: i32,
    complaint: &'static str,
}

const fn altered(
    test: &'static str,
    file: &'static str,
    texts: &'static [(&'static str, &'static str)],
    (code, complaint): (i32, &'static str),
) -> Altered {
    Altered { test, file, texts, code, complaint }
}

const GRADIENTS: (i32, &str) = (WRONG, "wrong: the gradient of ");
const ACCUMULATE: &str = "check(dormouse_prefix_accumulate(";

const ALTERED: &[Altered] = &[
    altered("no-gradients-of-keys", "stage.c", &[(ACCUMULATE, "")], GRADIENTS),
    altered(
        "keys-counted-twice",
        "stage.c",
        &[(ACCUMULATE, "for (int i = 0; i < 2; i++) check(dormouse_prefix_accumulate(")],
        GRADIENTS,
    ),
    altered("weights-of-one", "group.c", &[("s->weight)", "1.0)")], GRADIENTS),
    altered(
        "positions-off-by-one",
        "group.c",
        &[("m->first_position)", "m->first_position + 1)")],
        GRADIENTS,
    ),
    altered(
        "prefix-unread",
        "model.c",
        &[("if (prefix == NULL) {\n        attend", "if (1) {\n        attend")],
        GRADIENTS,
    ),
    altered(
        "bytes-changed-asleep",
        "stage.c",
        &[("\"backward begins\");", "\"\"); prefix.saved[l].tensors[SAVED_WIDE][3] += 1e-6;")],
        GRADIENTS,
    ),
    altered(
        "kept-awake",
        "stage.c",
        &[("l, dormant, 1)", "l, dormant, 0)")],
        (WRONG, "wrong: all saved tensors but K and V can sleep"),
    ),
    altered(
        "used-asleep",
        "stage.c",
        &[
            ("create(runtime, plan, 0,", "create(runtime, NULL, 0,"),
            ("DORMOUSE_PHASE_C", ""),
            ("DORMOUSE_EDGE_BACKWARD_BEGIN", ""),
            ("DORMOUSE_EDGE_BACKWARD_END", ""),
        ],
        (WRONG, "wrong: none is used before the mark that wakes it"),
    ),
    altered(
        "wake-not-marked",
        "stage.c",
        &[("DORMOUSE_EDGE_BACKWARD_BEGIN", "")],
        (LIBRARY, "backward ends: DORMOUSE_ERR_STATE"),
    ),
    // Buffers hold less than a pass: two stages that both send first wait for each other.
    altered(
        "sends-before-receives",
        "stage.c",
        &[
            ("PEER_WAIT_SECONDS = 60", "PEER_WAIT_SECONDS = 1"),
            (
                "\"stage_list_plan\");",
                "\"stage_list_plan\");
    for (stage_step *it = list.steps; it + 1 < list.steps + list.step_count; it++) {
        if (it[0].kind == STEP_RECEIVE && it[1].kind == STEP_SEND) {
            stage_step first = it[0];
            it[0] = it[1];
            it[1] = first;
        }
    }",
            ),
        ],
        (PEER, "the other stage is silent for 1 s"),
    ),
    altered(
        "bytes-of-fp32",
        "stage.c",
        &[("row_bytes = HIDDEN * sizeof(double)", "row_bytes = HIDDEN * sizeof(float)")],
        (WRONG, "wrong: bytes sent are those planned"),
    ),
];

impl Altered {
    fn run(&self) -> Ended {
        let dir = folder(&format!("trainer-{}", self.test));
        for name in SOURCES.iter().chain(&HEADERS) {
            fs::copy(example().join(name), dir.join(name)).unwrap();
        }
        let path = dir.join(self.file);
        let mut source = fs::read_to_string(&path).unwrap();
        for (before, after) in self.texts {
            assert_eq!(source.matches(before).count(), 1, "{before:?} is once in {}", self.file);
            source = if after.is_empty() {
                let lines = source.lines().filter(|line| !line.contains(before));
                lines.collect::<Vec<_>>().join("\n") + "\n"
            } else {
                source.replace(before, after)
            };
        }
        fs::write(path, source).unwrap();
        run(clean(&compiled(&dir, &dir)).arg(&dir))
    }
}

#[test]
fn altered_trainers_notice() {
    for it in ALTERED {
        let ended = it.run();
        assert_eq!(ended.code, Some(it.code), "{}: {}\n{}", it.test, ended.out, ended.err);
        ended.complains(it.complaint);
    }
}
