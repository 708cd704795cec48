//! The program; see the library.
#![forbid(unsafe_code)]

use std::io;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1);
    // Progress is drawn by a thread, so standard error is not locked.
    dormouse_cli::run(arguments, &mut io::stdout().lock(), &mut io::stderr())
}
