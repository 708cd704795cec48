//! What a shell and `man` know of the program, from the table of arguments.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::Program;

/// Arguments of `dormouse completion`.
#[derive(Args, Clone, Debug)]
pub(crate) struct CompletionArgs {
    /// The shell.
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Arguments of `dormouse man`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ManArgs {
    /// The page of a command. [default: that of the program]
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

pub(super) const COMPLETION_TAIL: &str = "\
bash: dormouse completion bash > ~/.local/share/bash-completion/completions/dormouse
zsh:  dormouse completion zsh > a directory of $fpath, as _dormouse
fish: dormouse completion fish > ~/.config/fish/completions/dormouse.fish";

pub(super) const MAN_TAIL: &str = "\
To read one: dormouse man plan | man -l -";

impl CompletionArgs {
    /// Returns the script of the shell.
    pub(crate) fn script(&self) -> String {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Program::command(), "dormouse", &mut script);
        String::from_utf8_lossy(&script).into_owned()
    }
}

impl ManArgs {
    /// Returns the page, in roff; the error of an unknown command.
    pub(crate) fn page(&self) -> Result<String, clap::Error> {
        let mut program = Program::command();
        program.build();
        let command = match &self.command {
            None => program,
            Some(name) => match program.find_subcommand(name) {
                Some(command) => command.clone(),
                None => {
                    let names: Vec<_> =
                        program.get_subcommands().map(clap::Command::get_name).collect();
                    let text = format!("{name} is no command; accepted: {}", names.join(", "));
                    return Err(program.error(clap::error::ErrorKind::InvalidValue, text));
                }
            },
        };
        let mut page = Vec::new();
        // Writing to memory never fails.
        let _ = clap_mangen::Man::new(command).render(&mut page);
        Ok(String::from_utf8_lossy(&page).into_owned())
    }
}
