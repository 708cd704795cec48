//! `dormouse top`: the live pages of trainers, as text.

mod screen;
mod view;

use std::io::{self, IsTerminal, Write};
use std::thread::sleep;
use std::time::Duration;

use crate::args::TopArgs;
use crate::live::{Reading, States};
use crate::text::as_json;
use crate::{Error, Output};

/// Columns of a frame that is not shown on a terminal.
const WIDTH: usize = 100;

/// Shows the pages until a key ends it, or once.
pub(crate) fn run(args: &TopArgs, out: &mut dyn Write) -> Result<Output, Error> {
    if !args.json && !args.once && io::stdout().is_terminal() && io::stdin().is_terminal() {
        screen::show(args, out).map_err(Error::Print)?;
        return Ok(Output::of(String::new()));
    }
    let before = Reading::of(&args.pages);
    sleep(Duration::from_millis(args.interval_ms));
    let mut states = States::between(&before, &Reading::of(&args.pages));
    states.sort(args.sort.unwrap_or_default());
    let is_good = !states.processes.is_empty() && states.unreadable.is_empty();
    let text =
        if args.json { as_json(&states)? } else { view::frame(&states, WIDTH).join("\n") + "\n" };
    Ok(Output { text, is_good })
}
