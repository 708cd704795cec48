//! Arguments: one table says which flags there are, what they do and what `--help` says of them.

mod flags;
mod help;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use dormouse_parallel::balance::BalanceUnit;
use dormouse_parallel::pipeline::PipelineOrder;
use lexopt::{Arg, Parser};

pub(crate) use flags::FLAGS;

use crate::read::STANDARD_INPUT;

/// An error of the command line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UsageError {
    /// The arguments have an invalid form.
    #[error("{0}")]
    Arguments(lexopt::Error),
    /// No command is given.
    #[error("no command; accepted: plan, --help, --version")]
    NoCommand,
    /// The command is unknown.
    #[error("no command {seen:?}; accepted: plan, --help, --version")]
    Command {
        /// The argument seen.
        seen: OsString,
    },
    /// The flag is unknown.
    #[error("no flag {seen}; accepted: {}", flags::longs())]
    Flag {
        /// The flag seen.
        seen: String,
    },
    /// The value of a flag is not accepted.
    #[error("--{flag} is {seen:?}; accepted: {accepted}")]
    Value {
        /// The flag.
        flag: &'static str,
        /// The value seen.
        seen: OsString,
        /// The values accepted.
        accepted: String,
    },
    /// No file is given.
    #[error("no file; accepted: one or more, - for standard input")]
    NoFile,
    /// Standard input is named twice.
    #[error("standard input named twice; accepted: - once")]
    Twice,
    /// A flag requires another flag.
    #[error("--{flag} without --{needs}; accepted: --{flag} with --{needs}")]
    Needs {
        /// The flag.
        flag: &'static str,
        /// The required flag.
        needs: &'static str,
    },
}

/// A parsed command line.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// A text to print.
    Text(String),
    /// A plan.
    Plan(Box<PlanArgs>),
}

/// Arguments of `dormouse plan`. 0 leaves a number to the planner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanArgs {
    /// Files of sequences.
    pub files: Vec<PathBuf>,
    /// The column of token ids in Parquet and Arrow files.
    pub column: Option<String>,
    /// Model name or file.
    pub model: Option<OsString>,
    /// Machine description file.
    pub machine: Option<PathBuf>,
    /// Maximum rows per microbatch.
    pub microbatch_rows: u32,
    /// Longest run of rows computed at once.
    pub block_rows: u64,
    /// Layers woken ahead of need.
    pub window_layers: u32,
    /// Whether something reads the last layer's output on rows that nothing scores.
    pub last_layer_live: bool,
    /// Whether to share prefixes even if it does not pay.
    pub always_share: bool,
    /// Data-parallel ranks.
    pub ranks: u32,
    /// Unit of assignment to ranks.
    pub unit: Option<BalanceUnit>,
    /// Whether ranks may exchange shared prefixes.
    pub exchange: bool,
    /// Whether ops contain collectives.
    pub collectives: bool,
    /// Pipeline stages.
    pub stages: u32,
    /// Parts of a stage.
    pub virtual_stages: u32,
    /// Chunks of a prefix.
    pub chunks: u32,
    /// Order of groups on a stage.
    pub order: Option<PipelineOrder>,
    /// Whether sends block their stage until received.
    pub blocking: bool,
    /// Whether to print JSON.
    pub json: bool,
    /// Output directory.
    pub out: Option<PathBuf>,
}

/// Returns whether a flag was given.
type Given = fn(&PlanArgs) -> bool;

/// Flags that say nothing without another.
const NEEDS: &[(&str, &str, Given, Given)] = &[
    ("machine", "model", |it| it.machine.is_some(), |it| it.model.is_some()),
    ("ranks", "model", |it| it.ranks > 0, |it| it.model.is_some()),
    ("stages", "model", |it| it.stages > 0, |it| it.model.is_some()),
    ("stages", "machine", |it| it.stages > 0, |it| it.machine.is_some()),
    ("out", "model", |it| it.out.is_some(), |it| it.model.is_some()),
    ("unit", "ranks", |it| it.unit.is_some(), |it| it.ranks > 0),
    ("exchange", "ranks", |it| it.exchange, |it| it.ranks > 0),
    ("collectives", "ranks", |it| it.collectives, |it| it.ranks > 0),
    ("virtual-stages", "stages", |it| it.virtual_stages > 0, |it| it.stages > 0),
    ("chunks", "stages", |it| it.chunks > 0, |it| it.stages > 0),
    ("order", "stages", |it| it.order.is_some(), |it| it.stages > 0),
    ("blocking", "stages", |it| it.blocking, |it| it.stages > 0),
];

/// Understands arguments, the program's name apart.
///
/// # Errors
/// See [`UsageError`].
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, UsageError> {
    let mut parser = Parser::from_args(arguments);
    match parser.next().map_err(UsageError::Arguments)? {
        None => Err(UsageError::NoCommand),
        Some(Arg::Long("help") | Arg::Short('h')) => Ok(Command::Text(help::program())),
        Some(Arg::Long("version") | Arg::Short('V')) => Ok(Command::Text(help::version())),
        Some(Arg::Value(command)) if command == "plan" => plan(parser),
        Some(Arg::Value(seen)) => Err(UsageError::Command { seen }),
        Some(Arg::Long(name)) => Err(UsageError::Command { seen: format!("--{name}").into() }),
        Some(Arg::Short(name)) => Err(UsageError::Command { seen: format!("-{name}").into() }),
    }
}

fn plan(mut parser: Parser) -> Result<Command, UsageError> {
    let mut args = PlanArgs::default();
    while let Some(arg) = parser.next().map_err(UsageError::Arguments)? {
        let (flag, seen) = match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Text(help::plan())),
            // What a shell makes of a variable that is not set.
            Arg::Value(file) if file.is_empty() => return Err(UsageError::NoFile),
            Arg::Value(file) => {
                args.files.push(file.into());
                continue;
            }
            Arg::Long(name) => (flags::long(name), format!("--{name}")),
            Arg::Short(name) => (flags::short(name), format!("-{name}")),
        };
        let flag = flag.ok_or(UsageError::Flag { seen })?;
        match flag.takes {
            flags::Takes::Nothing(set) => set(&mut args),
            flags::Takes::Value { set, .. } => {
                let value = parser.value().map_err(UsageError::Arguments)?;
                set(&mut args, &value).map_err(|accepted| UsageError::Value {
                    flag: flag.long,
                    seen: value,
                    accepted,
                })?;
            }
        }
    }
    if args.files.is_empty() {
        return Err(UsageError::NoFile);
    }
    if args.files.iter().filter(|file| file.as_os_str() == STANDARD_INPUT).count() > 1 {
        return Err(UsageError::Twice);
    }
    let lacking = NEEDS.iter().find(|(_, _, given, there)| given(&args) && !there(&args));
    match lacking {
        Some(&(flag, needs, ..)) => Err(UsageError::Needs { flag, needs }),
        None => Ok(Command::Plan(Box::new(args))),
    }
}

/// A number from a value.
fn number<T>(value: &OsStr, least: T, most: T) -> Result<T, String>
where
    T: std::str::FromStr + PartialOrd + std::fmt::Display,
{
    let number = value.to_str().and_then(|text| text.parse().ok());
    let number = number.filter(|number| (&least..=&most).contains(&number));
    number.ok_or_else(|| format!("{least} to {most}"))
}

/// A name or a path: what a shell makes of a variable that is not set is none.
fn named(value: &OsStr) -> Result<OsString, String> {
    if value.is_empty() { Err("what is not empty".to_owned()) } else { Ok(value.to_owned()) }
}

/// One of several words.
fn choice<T: Copy>(value: &OsStr, words: &[(&str, T)]) -> Result<T, String> {
    let found = words.iter().find(|(word, _)| value == *word);
    let names = || words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
    found.map(|(_, meant)| *meant).ok_or_else(names)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::flags::Takes;
    use super::*;

    fn parsed(arguments: &[&str]) -> PlanArgs {
        let all = ["plan"].iter().chain(arguments).map(OsString::from);
        match parse(all) {
            Ok(Command::Plan(args)) => *args,
            other => panic!("{arguments:?}: {other:?}"),
        }
    }

    /// A value that a flag takes and that is not what it is left at.
    fn value(flag: &str) -> &'static str {
        match flag {
            "unit" => "group",
            "order" => "groups",
            _ => "7",
        }
    }

    #[test]
    fn every_flag_of_the_table_changes_what_is_asked_for() {
        // All that a flag may need.
        let base = ["f", "--model=m", "--machine=M", "--ranks=2", "--stages=2"];
        let before = parsed(&base);
        for flag in FLAGS {
            let mut spellings = vec![format!("--{}", flag.long)];
            spellings.extend(flag.short.map(|short| format!("-{short}")));
            for spelling in spellings {
                let mut arguments = base.to_vec();
                arguments.push(&spelling);
                if let Takes::Value { .. } = flag.takes {
                    arguments.push(value(flag.long));
                }
                assert_ne!(parsed(&arguments), before, "{spelling}");
            }
        }
    }

    #[test]
    fn flags_are_told_apart_and_fit_a_terminal() {
        let longs: BTreeSet<&str> = FLAGS.iter().map(|flag| flag.long).collect();
        let shorts: BTreeSet<char> = FLAGS.iter().filter_map(|flag| flag.short).collect();
        assert_eq!(longs.len(), FLAGS.len());
        assert_eq!(shorts.len(), FLAGS.iter().filter(|flag| flag.short.is_some()).count());
        assert!(!shorts.contains(&'h') && !longs.contains("help"));
        let text = help::plan();
        for flag in FLAGS {
            assert!(text.contains(&format!("--{}", flag.long)), "{}", flag.long);
            assert!(flag.help.iter().all(|line| text.contains(line)), "{}", flag.long);
        }
        for line in text.lines().chain(help::program().lines()) {
            assert!(line.chars().count() <= 82, "{line}");
        }
        for (flag, needs, ..) in NEEDS {
            assert!(longs.contains(flag) && longs.contains(needs), "{flag} needs {needs}");
        }
    }

    #[test]
    fn every_need_is_one() {
        for &(flag, needs, ..) in NEEDS {
            let mut arguments = vec!["plan".to_owned(), "f".to_owned()];
            for given in [flag, "model", "machine", "ranks", "stages"] {
                let takes = flags::long(given).map(|flag| flag.takes);
                let is_value = matches!(takes, Some(Takes::Value { .. }));
                if given != needs && (given == flag || !["ranks", "stages"].contains(&given)) {
                    arguments.push(format!("--{given}"));
                    arguments.extend(is_value.then(|| value(given).to_owned()));
                }
            }
            let refused = parse(arguments.iter().map(OsString::from));
            assert!(
                matches!(refused, Err(UsageError::Needs { needs: seen, .. }) if seen == needs),
                "{arguments:?}: {refused:?}"
            );
        }
    }
}
