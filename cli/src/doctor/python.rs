//! Python, torch and the package.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::Check;

/// Versions of torch that the tests run on, oldest and newest (pyproject.toml).
const TORCH_MIN: (u32, u32) = (2, 11);
const TORCH_TESTED: (u32, u32) = (2, 15);
/// Limit on the time of the interpreter.
const WAIT_MAX: Duration = Duration::from_secs(30);
const WAIT_STEP: Duration = Duration::from_millis(10);
/// Maximum bytes that are read of its answer.
const ANSWER_BYTES_MAX: u64 = 1 << 16;

/// Imports nothing of torch: its import takes seconds.
const SCRIPT: &str = "
import importlib.metadata as metadata, importlib.util, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def place(name):
    found = importlib.util.find_spec(name)
    return found and found.origin
print(json.dumps({'python': sys.version.split()[0], 'executable': sys.executable,
    'torch': version('torch'), 'dormouse': version('dormouse'), 'package': place('dormouse')}))
";

/// What the interpreter says.
#[derive(Debug, Deserialize)]
struct Answer {
    python: String,
    executable: String,
    torch: Option<String>,
    dormouse: Option<String>,
    package: Option<String>,
}

/// Asks the interpreter at `named`, or `python3` of PATH.
pub(super) fn checks(named: Option<&Path>) -> Vec<Check> {
    const WHAT: &str = "python";
    let program = named.unwrap_or(Path::new("python3"));
    match query(program) {
        Ok(answer) => answered(&answer),
        Err(reason) => {
            let seen = format!("{}: {reason}", program.display());
            let advice =
                "name the trainer's interpreter with --python; only Python trainers need one";
            vec![match named {
                Some(_) => Check::broken(WHAT, seen, advice),
                None => Check::advice(WHAT, seen, advice),
            }]
        }
    }
}

fn answered(answer: &Answer) -> Vec<Check> {
    let python = Check::ok("python", format!("{} at {}", answer.python, answer.executable));
    vec![python, torch(answer.torch.as_deref()), package(answer)]
}

fn torch(seen: Option<&str>) -> Check {
    const WHAT: &str = "torch";
    let Some(seen) = seen else {
        return Check::advice(
            WHAT,
            "not installed",
            "only Python trainers need it: pip install torch",
        );
    };
    let (oldest, newest) = (text(TORCH_MIN), text(TORCH_TESTED));
    let mut numbers = seen.split('.').map(|part| part.parse::<u32>());
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < TORCH_MIN => {
            Check::broken(WHAT, seen, format!("install torch {oldest} to {newest}"))
        }
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) <= TORCH_TESTED => {
            Check::ok(WHAT, seen)
        }
        _ => Check::advice(WHAT, seen, format!("tested with torch {oldest} to {newest}")),
    }
}

fn text((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

fn package(answer: &Answer) -> Check {
    const WHAT: &str = "dormouse package";
    let ours = env!("CARGO_PKG_VERSION");
    match (&answer.package, &answer.dormouse) {
        (None, _) => {
            let advice = "in a checkout, into this Python: pip install .; programs in C need none";
            Check::advice(WHAT, "not importable", advice)
        }
        (Some(place), Some(version)) if version != ours => {
            let advice = format!("this program is version {ours}: install both from one wheel");
            Check::advice(WHAT, format!("{version} at {place}"), advice)
        }
        (Some(place), _) => Check::ok(WHAT, place),
    }
}

fn query(program: &Path) -> Result<Answer, String> {
    let mut command = Command::new(program);
    command.args(["-c", SCRIPT]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let started = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if started.elapsed() < WAIT_MAX => std::thread::sleep(WAIT_STEP),
            Ok(None) | Err(_) => {
                // It may have ended meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer within {} s", WAIT_MAX.as_secs()));
            }
        }
    };
    let mut text = Vec::new();
    if let Some(out) = child.stdout.take() {
        out.take(ANSWER_BYTES_MAX).read_to_end(&mut text).map_err(|error| error.to_string())?;
    }
    serde_json::from_slice(&text).map_err(|_| format!("is no Python 3.8 or later: {status}"))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn versions_of_torch_are_compared_as_numbers() {
        let verdict = |seen| torch(seen).verdict;
        assert_eq!(verdict(None), Verdict::Advice);
        for (seen, wanted) in [
            ("2.9.1+cu128", Verdict::Broken),
            ("1.13.0", Verdict::Broken),
            ("2.11.0", Verdict::Ok),
            ("2.15.0+cpu", Verdict::Ok),
            ("2.16.0a0", Verdict::Advice),
            ("3.0", Verdict::Advice),
            ("nightly", Verdict::Advice),
        ] {
            assert_eq!(verdict(Some(seen)), wanted, "{seen}");
        }
    }

    #[test]
    fn the_versions_are_those_of_the_project() {
        let project = include_str!("../../../pyproject.toml");
        assert!(project.contains(&format!("torch>={}", text(TORCH_MIN))));
        assert!(project.contains(&format!("# All tests run on torch {} ", text(TORCH_TESTED))));
    }
}
