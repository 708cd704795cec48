//! Command-line arguments. The documentation of each field is its help, and the shell completions and
//! the manual page come from the same table.

mod doctor;
mod merge;
mod metrics;
mod params;
mod plan;
mod replay;
mod report;
mod shell;
mod top;

use std::ffi::OsString;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

pub(crate) use doctor::DoctorArgs;
pub(crate) use merge::MergeArgs;
pub(crate) use metrics::MetricsArgs;
pub(crate) use params::ParamsArgs;
pub use plan::PlanArgs;
pub(crate) use replay::ReplayArgs;
pub(crate) use report::{DiffArgs, ReportArgs};
pub(crate) use shell::{CompletionArgs, ManArgs};
pub(crate) use top::{Order, TopArgs};

use crate::read::STANDARD_INPUT;

const OUTPUT: &str = "Output";

/// Plans and watches the training of language models on sequences that share prefixes.
#[derive(Debug, Parser)]
#[command(name = "dormouse", version, arg_required_else_help = false)]
#[command(disable_help_subcommand = true, args_override_self = true)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

/// A command with its arguments.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Predicts the cost of a batch of sequences whose shared prefixes run once.
    #[command(long_about = plan::ABOUT, after_help = plan::tail())]
    Plan(Box<PlanArgs>),
    /// Shows the memory and copies of running trainers.
    #[command(long_about = top::ABOUT, after_help = top::TAIL)]
    Top(TopArgs),
    /// Prints or serves the figures of running trainers as OpenMetrics.
    #[command(long_about = metrics::ABOUT, after_help = metrics::TAIL)]
    Metrics(MetricsArgs),
    /// Checks this machine, and says what to change.
    #[command(long_about = doctor::ABOUT, after_help = doctor::TAIL)]
    Doctor(DoctorArgs),
    /// Shows every parameter with its value and where that came from.
    #[command(long_about = params::ABOUT, after_help = params::TAIL)]
    Params(ParamsArgs),
    /// Says in text what a dump shows.
    #[command(long_about = report::REPORT_ABOUT, after_help = report::TAIL)]
    Report(ReportArgs),
    /// Shows what differs between two dumps.
    #[command(after_help = report::TAIL)]
    Diff(DiffArgs),
    /// Joins dumps and traces of torch.profiler on one clock.
    #[command(long_about = merge::ABOUT, after_help = merge::TAIL)]
    Merge(MergeArgs),
    /// Replays a log of allocations, and says what the allocator would hold.
    #[command(long_about = replay::ABOUT, after_help = replay::TAIL)]
    Replay(ReplayArgs),
    /// Prints the completion script of a shell.
    #[command(after_help = shell::COMPLETION_TAIL)]
    Completion(CompletionArgs),
    /// Prints a page of the manual.
    #[command(after_help = shell::MAN_TAIL)]
    Man(ManArgs),
}

/// Parses the arguments after the program's name.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, clap::Error> {
    let all = std::iter::once("dormouse".into()).chain(arguments);
    let command = Program::try_parse_from(all)?.command;
    if let Command::Plan(args) = &command
        && args.files.iter().filter(|file| file.as_os_str() == STANDARD_INPUT).count() > 1
    {
        let text = "standard input is named twice; accepted: - once";
        return Err(Program::command().error(ErrorKind::ArgumentConflict, text));
    }
    Ok(command)
}

/// The text of an error with its suggestions, without usage, on one line.
pub(crate) fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let mut parts = text.split("\n\n");
    let head = parts.next().unwrap_or(&text);
    let head = head.strip_prefix("error: ").unwrap_or(head);
    let joined = |part: &str| part.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let tips = parts.filter_map(|part| part.trim().strip_prefix("tip: "));
    std::iter::once(head).chain(tips).map(joined).collect::<Vec<_>>().join("; ")
}

/// Parses one of several words.
fn choice<T: Copy + Send + Sync + 'static>(
    words: &'static [(&str, T)],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word)).try_map(move |seen| {
        let found = words.iter().find(|(word, _)| *word == seen);
        found.map(|(_, value)| *value).ok_or("unknown")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Command, clap::Error> {
        parse(arguments.iter().map(OsString::from))
    }

    fn plan(arguments: &[&str]) -> Result<Command, clap::Error> {
        parsed(&[&["plan"], arguments].concat())
    }

    /// Arguments that each command requires, with all flags that another flag requires.
    fn base(command: &str) -> &'static [&'static str] {
        match command {
            "plan" => &["plan", "f", "--model=m", "--machine=M", "--ranks=2", "--stages=2"],
            "top" => &["top"],
            "metrics" => &["metrics"],
            "doctor" => &["doctor"],
            "params" => &["params"],
            "report" => &["report", "f"],
            "diff" => &["diff", "f", "g"],
            "merge" => &["merge", "f", "--out=o"],
            "replay" => &["replay", "f"],
            "completion" => &["completion", "bash"],
            "man" => &["man"],
            other => panic!("{other} has no base"),
        }
    }

    /// A value that the flag accepts and that is not its default.
    fn value(flag: &str) -> &'static str {
        match flag {
            "unit" => "group",
            "order" => "groups",
            "sort" => "stall",
            "interval-ms" => "700",
            "listen" => "127.0.0.1:7",
            _ => "7",
        }
    }

    #[test]
    fn every_flag_changes_the_arguments() {
        Program::command().debug_assert();
        for command in Program::command().get_subcommands() {
            let base = base(command.get_name());
            let before = format!("{:?}", parsed(base).unwrap());
            for flag in command.get_opts() {
                let long = flag.get_long().unwrap();
                let mut spellings = vec![format!("--{long}")];
                spellings.extend(flag.get_short().map(|short| format!("-{short}")));
                for spelling in spellings {
                    let mut arguments = base.to_vec();
                    arguments.push(&spelling);
                    if flag.get_action().takes_values() {
                        arguments.push(value(long));
                    }
                    let after = format!("{:?}", parsed(&arguments).unwrap());
                    assert_ne!(after, before, "{arguments:?}");
                }
            }
        }
    }

    #[test]
    fn help_fits_a_terminal_and_names_every_flag() {
        let program = Program::command().render_long_help().to_string();
        for command in Program::command().get_subcommands() {
            assert!(program.contains(command.get_name()));
            let text = command.clone().render_long_help().to_string();
            for flag in command.get_opts() {
                let long = flag.get_long().unwrap();
                assert!(text.contains(&format!("--{long}")), "{long}");
            }
            for line in text.lines().chain(program.lines()) {
                assert!(line.chars().count() <= 90, "{line}");
            }
        }
    }

    #[test]
    fn a_flag_without_the_flag_it_requires_is_refused() {
        for (flag, needs) in [
            ("machine", "model"),
            ("ranks", "model"),
            ("stages", "model"),
            ("stages", "machine"),
            ("out", "model"),
            ("unit", "ranks"),
            ("exchange", "ranks"),
            ("collectives", "ranks"),
            ("virtual-stages", "stages"),
            ("chunks", "stages"),
            ("order", "stages"),
            ("blocking", "stages"),
        ] {
            let mut arguments = vec!["f".to_owned()];
            for given in [flag, "model", "machine"] {
                let is_switch = ["exchange", "collectives", "blocking"].contains(&given);
                if given != needs && !arguments.contains(&format!("--{given}")) {
                    arguments.push(format!("--{given}"));
                    arguments.extend((!is_switch).then(|| value(given).to_owned()));
                }
            }
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let refused = plan(&arguments).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::MissingRequiredArgument, "{arguments:?}");
            assert!(sentence(&refused).contains(&format!("--{needs}")), "{}", sentence(&refused));
        }
    }
}
