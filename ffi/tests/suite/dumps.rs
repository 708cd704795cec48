//! Dumps that `DORMOUSE_DUMP` requests: what causes one, what prevents one, and what they leave behind.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{Ended, Links, clean, folder, preload, run, test_program};

/// A run of the program, with the folder of its dumps.
struct Run {
    ended: Ended,
    dumps: PathBuf,
}

impl Run {
    /// The names of the files left, sorted.
    fn names(&self) -> Vec<String> {
        names(&self.dumps)
    }

    /// Fails unless the files are one dump each for `reasons`, in this order, and each is a whole page.
    #[track_caller]
    fn wrote(&self, reasons: &[&str]) -> &Self {
        let names = self.names();
        let ends: Vec<String> = names
            .iter()
            .enumerate()
            .map(|(at, name)| {
                name.rsplit_once(&format!("-{at}-")).unwrap_or(("", name)).1.to_owned()
            })
            .collect();
        let wanted: Vec<String> = reasons.iter().map(|why| format!("{why}-host.html")).collect();
        assert_eq!(ends, wanted, "{}\n{}", self.ended.out, self.ended.err);
        for name in names {
            assert!(name.starts_with("dormouse-") && name.contains("-rank5-pid"), "{name}");
            is_whole(&self.dumps.join(name));
        }
        self
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[track_caller]
fn is_whole(page: &Path) {
    let text = std::fs::read_to_string(page).unwrap();
    let (start, end) = (text.to_lowercase(), text.trim_end().to_lowercase());
    assert!(start.starts_with("<!doctype html>") && end.ends_with("</html>"), "{page:?}");
}

/// Runs `dumps` in `mode`, with `DORMOUSE_DUMP` and more variables.
fn dumped(mode: &str, reasons: &str, more: &[(&str, &str)]) -> Run {
    dumped_in(&folder(&format!("dumps-{mode}")), mode, reasons, more)
}

fn dumped_in(place: &Path, mode: &str, reasons: &str, more: &[(&str, &str)]) -> Run {
    let dumps = place.join("written");
    let _exists = std::fs::create_dir(&dumps);
    let program = test_program("dumps", place, Links::Library);
    let mut command = clean(&program);
    command.env("RANK", "5").env("DORMOUSE_DUMP_DIR", &dumps);
    // A dump that went to the working directory would be seen.
    command.current_dir(place).arg(&dumps).arg(mode);
    if !reasons.is_empty() {
        command.env("DORMOUSE_DUMP", reasons);
    }
    for (name, value) in more {
        match *value {
            "" => command.env_remove(name),
            value => command.env(name, value),
        };
    }
    let ended = run(&mut command);
    Run { ended, dumps }
}

#[test]
fn an_out_of_memory_text_names_tag_layer_phase_dump_and_command_in_twelve_lines() {
    let run = dumped("oom", "", &[]);
    assert_eq!(run.ended.code, Some(0), "{}", run.ended.err);
    let reports: Vec<&str> = run.ended.out.split("\n----\n").collect();
    assert_eq!(reports.len(), 11, "{}", run.ended.out);
    let first = reports[0];
    assert!(first.lines().count() <= 12, "{first}");
    let place = "requested for tag \"optimizer\", layer 0 of prefix 7, in phase A of prefix 7, forward of layer 0";
    let holder = "held by tag \"optimizer\": 40.0 MiB awake";
    let page = run.dumps.join(&run.names()[0]);
    let command = format!("The dump shows what held the memory: xdg-open {}", page.display());
    for piece in [place, holder, &command] {
        assert!(first.contains(piece), "{piece}\nnot in\n{first}");
    }
    // Eight of the ten stay: the first, and the last seven.
    let stays = |report: &&str| run.names().iter().any(|name| report.ends_with(name.as_str()));
    let stay: Vec<bool> = reports[..10].iter().map(stays).collect();
    assert_eq!(stay, [true, false, false, true, true, true, true, true, true, true]);
    assert_eq!((run.names().len(), run.ended.err.as_str()), (8, ""));
}

#[test]
fn a_malloc_that_runs_out_has_its_dump_written_by_the_thread() {
    let (budget, library) = ("64MiB".to_owned(), preload().display().to_string());
    let run = dumped(
        "malloc",
        "oom",
        &[("LD_PRELOAD", &library), ("DORMOUSE_CPU_BUDGET_BYTES", &budget)],
    );
    assert_eq!(run.ended.code, Some(0), "{}\n{}", run.ended.out, run.ended.err);
    run.ended.says("all checks passed").complains("1073741824 bytes").complains("xdg-open /");
    run.wrote(&["oom"; 5]);
    let reports = run.ended.err.matches("1073741824 bytes").count();
    let lines = run.ended.err.lines().filter(|line| {
        line.contains("1073741824 bytes")
            && line.contains("The dump shows what held the memory: xdg-open /")
    });
    assert_eq!((reports, lines.count()), (5, 2), "the first three are longer: {}", run.ended.err);
}

#[test]
fn an_exit_writes_one_dump_and_keeps_its_status() {
    let run = dumped("exit", "exit", &[]);
    assert_eq!((run.ended.code, run.ended.err.as_str()), (Some(3), ""));
    run.wrote(&["exit"]);
    // A return from `main` is an exit.
    let run = dumped("return", "exit,oom", &[]);
    run.ended.well();
    run.wrote(&["exit"]);
    let run = dumped("_exit", "exit", &[]);
    run.ended.well();
    run.wrote(&[]);
    let run = dumped("off", "off", &[]);
    run.ended.well();
    run.wrote(&[]);
}

#[test]
fn a_signal_writes_a_dump_and_the_program_goes_on() {
    let run = dumped("signal", "signal", &[]);
    run.ended.well().says("all checks passed");
    run.wrote(&["signal"; 2]);
}

#[test]
fn a_storm_of_signals_is_few_dumps() {
    let run = dumped("storm", "signal", &[]);
    run.ended.well().says("all checks passed");
    // The program has counted them.
    let count = run.names().len();
    run.wrote(&vec!["signal"; count]);
}

#[test]
fn a_handler_of_the_program_stays() {
    for (mode, why) in [
        (
            "handled",
            "the program has a handler of SIGUSR1; DORMOUSE_DUMP_SIGNAL=SIGUSR2 may be free",
        ),
        ("ignored", "the program ignores SIGUSR1"),
        ("replaced", "the program has replaced the handler of dumps"),
    ] {
        let run = dumped(mode, "signal", &[]);
        assert_eq!(run.ended.code, Some(0), "{}", run.ended.err);
        run.ended.says("all checks passed").complains(why);
        assert_eq!(run.ended.err.lines().count(), 1, "{}", run.ended.err);
        run.wrote(&[]);
    }
    // Another signal than the program's.
    let run = dumped_in(
        &folder("dumps-other-signal"),
        "handled",
        "signal",
        &[("DORMOUSE_DUMP_SIGNAL", "SIGUSR2")],
    );
    run.ended.well();
    // Without the reason, the signal has its default action.
    let run = dumped_in(&folder("dumps-no-signal"), "signal", "oom", &[]);
    assert_eq!(run.ended.signal, Some(10), "{}", run.ended.err);
}

#[test]
fn a_trigger_file_is_removed_and_writes_a_dump() {
    let run = dumped("trigger", "trigger", &[]);
    run.ended.well().says("all checks passed");
    run.wrote(&["trigger"; 2]);
}

#[test]
fn a_forked_child_writes_nothing_and_ends_by_the_signal() {
    let run = dumped("fork", "exit,signal", &[]);
    run.ended.well().says("all checks passed");
    run.wrote(&["exit"]);
}

#[test]
fn a_call_writes_a_dump_and_returns_its_path() {
    let run = dumped("calls", "off", &[]);
    run.ended.well().says("all checks passed");
    run.wrote(&["call"; 2]);
}

#[test]
fn a_call_without_memory_for_a_dump_is_an_error() {
    let run = dumped("poor", "off", &[]);
    run.ended.well().says("all checks passed");
    run.wrote(&[]);
}

#[test]
fn nothing_is_written_without_a_directory_and_reasons_without_one_are_a_warning() {
    let run = dumped("none", "", &[("DORMOUSE_DUMP_DIR", "")]);
    run.ended.well().says("all checks passed");
    assert!(!run.ended.out.contains("ump "), "neither a dump nor a reason: {}", run.ended.out);
    run.wrote(&[]);
    let place = folder("dumps-nowhere");
    let run = dumped_in(&place, "none", "oom,exit,signal,trigger", &[("DORMOUSE_DUMP_DIR", "")]);
    run.ended.complains("DORMOUSE_DUMP is set, but DORMOUSE_DUMP_DIR is not");
    assert_eq!(run.ended.err.lines().count(), 1, "{}", run.ended.err);
    // The working directory has the program and the empty folder.
    assert_eq!(names(&place), ["dumps", "written"]);
}

#[test]
fn settings_without_their_reason_are_a_warning() {
    let more = [("DORMOUSE_DUMP_SIGNAL", "SIGUSR2"), ("DORMOUSE_DUMP_TRIGGER", "now")];
    let run = dumped("unused", "oom", &more);
    run.ended.complains("\"DORMOUSE_DUMP_SIGNAL\"").complains("\"DORMOUSE_DUMP_TRIGGER\"");
    assert_eq!(run.ended.err.lines().count(), 2, "{}", run.ended.err);
    for (name, value) in [
        ("DORMOUSE_DUMP", "oom,never"),
        ("DORMOUSE_DUMP_SIGNAL", "SIGKILL"),
        ("DORMOUSE_DUMP_SIGNAL", "10"),
    ] {
        let run = dumped_in(&folder("dumps-bad"), "oom", "", &[(name, value)]);
        run.ended.complains("DORMOUSE_ERR_CONFIG").complains(name).complains(value);
    }
}

#[test]
fn a_disk_without_room_is_one_warning_for_each_reason_and_leaves_no_file() {
    let run = dumped("limited", "oom,exit,signal", &[]);
    assert_eq!(run.ended.code, Some(0), "{}\n{}", run.ended.out, run.ended.err);
    run.ended.says("all checks passed").says("No dump was written: could not write");
    // Out of memory twice, a signal and the exit.
    assert_eq!(run.ended.err.matches("File too large").count(), 3, "{}", run.ended.err);
    assert_eq!(run.ended.err.lines().count(), 3, "{}", run.ended.err);
    run.wrote(&[]);
}

#[test]
fn a_directory_that_cannot_be_written_is_a_warning_at_the_start_and_one_for_each_reason() {
    let place = folder("dumps-absent");
    let absent = place.join("absent");
    let more = [("DORMOUSE_DUMP_DIR", absent.to_str().unwrap())];
    let run = dumped_in(&place, "oom", "oom,exit,trigger", &more);
    assert_eq!(run.ended.code, Some(0), "{}", run.ended.err);
    run.ended.complains("No such file or directory");
    let warnings = run.ended.err.lines().filter(|line| line.contains("cannot be written")).count();
    // The start, ten times out of memory, the exit.
    assert_eq!(warnings, 3, "{}", run.ended.err);
    // A file, which root cannot write below either.
    let file = place.join("file");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o400)).unwrap();
    let run = dumped_in(&place, "oom", "exit", &[("DORMOUSE_DUMP_DIR", file.to_str().unwrap())]);
    run.ended.complains("is no directory").complains("Not a directory");
    assert_eq!(run.ended.err.lines().count(), 2, "{}", run.ended.err);
}

#[test]
fn a_killed_process_leaves_whole_dumps_and_at_most_one_file_aside() {
    let place = folder("dumps-killed");
    let dumps = place.join("written");
    std::fs::create_dir(&dumps).unwrap();
    let program = test_program("dumps", &place, Links::Library);
    for round in 0..10 {
        let mut command = clean(&program);
        command.env("RANK", "5").env("DORMOUSE_DUMP_DIR", &dumps).arg(&dumps).arg("killed");
        let mut child = command.spawn().unwrap();
        while names(&dumps).iter().all(|name| !name.ends_with(".html")) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut aside = 0;
        for name in names(&dumps) {
            let path = dumps.join(&name);
            match name.ends_with(".html") {
                true => is_whole(&path),
                false => aside += 1,
            }
            std::fs::remove_file(path).unwrap();
        }
        assert!(aside <= 1, "{aside} files");
    }
}
