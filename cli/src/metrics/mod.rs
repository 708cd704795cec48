//! `dormouse metrics`: the live pages of trainers as an OpenMetrics page, printed, kept in a file or served.

mod page;
mod serve;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use crate::args::MetricsArgs;
use crate::live::{Reading, States};
use crate::{Error, Output};

/// Prints the page, or keeps it in a file or serves it until the program is ended.
pub(crate) fn run(args: &MetricsArgs, out: &mut dyn Write) -> Result<Output, Error> {
    if let Some(address) = args.listen {
        return serve::serve(address, &args.pages, out);
    }
    let Some(path) = &args.out else {
        return Ok(Output::of(current(&args.pages)));
    };
    loop {
        write_whole(path, &current(&args.pages))
            .map_err(|source| Error::Write { file: path.clone(), source })?;
        sleep(Duration::from_millis(args.interval_ms));
    }
}

/// Returns the page as it is now.
fn current(pages: &[PathBuf]) -> String {
    let reading = Reading::of(pages);
    page::page(&States::between(&reading, &reading))
}

/// Replaces the file by one that its owner alone reads: a reader finds a whole page.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".tmp");
    let mut file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&aside, path)
}
