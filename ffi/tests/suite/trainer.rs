//! The trainer in C (`examples/c/trainer`): two pipeline stages in two processes, and altered copies of it, whose
//! own checks must notice.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Ended, Links, clean, compile_all, folder, root, run};

/// Exit codes of `check.h`.
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

/// Runs a copy of the trainer in which each first text is the second.
fn altered(test: &str, file: &str, texts: &[(&str, &str)]) -> Ended {
    let dir = folder(&format!("trainer-{test}"));
    for name in SOURCES.iter().chain(&HEADERS) {
        fs::copy(example().join(name), dir.join(name)).unwrap();
    }
    let path = dir.join(file);
    let mut source = fs::read_to_string(&path).unwrap();
    for (before, after) in texts {
        assert_eq!(source.matches(before).count(), 1, "{before:?} is once in {file}");
        source = source.replace(before, after);
    }
    fs::write(path, source).unwrap();
    run(clean(&compiled(&dir, &dir)).arg(&dir))
}

/// A copy, its file, what changes in it, the exit code and the complaint.
type Altered =
    (&'static str, &'static str, &'static [(&'static str, &'static str)], i32, &'static str);

const ALTERED: &[Altered] = &[
    (
        "no-gradients-of-keys",
        "stage.c",
        &[(
            "check(dormouse_prefix_accumulate(node, l, slot, parts[slot], elems, DORMOUSE_DTYPE_F64, NULL), \"accumulate\");",
            "",
        )],
        WRONG,
        "wrong: the gradient of a layer",
    ),
    (
        "keys-counted-twice",
        "stage.c",
        &[
            (
                "for (uint32_t slot = 0; slot < 2; slot++) {\n            check(",
                "for (uint32_t i = 0; i < 4; i++) {\n            uint32_t slot = i % 2;\n            check(",
            ),
            ("            free(parts[slot]);\n", ""),
        ],
        WRONG,
        "wrong: the gradient of a layer",
    ),
    (
        "weights-of-one",
        "group.c",
        &[("s->first_label, s->weight)", "s->first_label, 1.0)")],
        WRONG,
        "wrong: the gradient of a layer",
    ),
    (
        "positions-off-by-one",
        "group.c",
        &[("m->sequence, m->first_position)", "m->sequence, m->first_position + 1)")],
        WRONG,
        "wrong: the gradient of",
    ),
    (
        "keys-of-the-prefix-unread",
        "model.c",
        &[("if (prefix == NULL) {\n        attend", "if (1) {\n        attend")],
        WRONG,
        "wrong: the gradient of a layer",
    ),
    (
        "sleeping-bytes-changed",
        "stage.c",
        &[(
            "\"backward begins\");",
            "\"backward begins\");\n        prefix.saved[l].tensors[SAVED_WIDE][3] += 1e-6;",
        )],
        WRONG,
        "wrong: the gradient of a layer",
    ),
    (
        "kept-awake",
        "stage.c",
        &[("add_dormant(node, l, dormant, 1)", "add_dormant(node, l, dormant, 0)")],
        WRONG,
        "wrong: all saved tensors but K and V can sleep",
    ),
    (
        "used-asleep",
        "stage.c",
        &[
            ("prefix_create(runtime, plan, 0,", "prefix_create(runtime, NULL, 0,"),
            (
                "    check(dormouse_prefix_enter_phase(node, DORMOUSE_PHASE_C, NULL), \"phase C\");\n",
                "",
            ),
            (
                "        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_BEGIN, l, NULL), \"backward begins\");\n",
                "",
            ),
            (
                "        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_END, l, NULL), \"backward ends\");\n",
                "",
            ),
        ],
        WRONG,
        "wrong: ",
    ),
    (
        "wake-not-announced",
        "stage.c",
        &[(
            "        check(dormouse_prefix_mark_edge(node, DORMOUSE_EDGE_BACKWARD_BEGIN, l, NULL), \"backward begins\");\n",
            "",
        )],
        LIBRARY,
        "backward ends: DORMOUSE_ERR_STATE",
    ),
    (
        "bytes-of-fp32",
        "stage.c",
        &[(
            "stage_list_plan(STAGES, stage, HIDDEN * sizeof(double)",
            "stage_list_plan(STAGES, stage, HIDDEN * sizeof(float)",
        )],
        WRONG,
        "wrong: bytes sent are those planned",
    ),
];

#[test]
fn altered_trainers_notice() {
    for &(test, file, texts, code, complaint) in ALTERED {
        let ended = altered(test, file, texts);
        assert_eq!(ended.code, Some(code), "{test}: {}\n{}", ended.out, ended.err);
        ended.complains(complaint);
    }
}
