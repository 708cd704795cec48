//! The live view on a terminal.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers, poll, read};
use crossterm::style::Print;
use crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode, size,
};
use crossterm::{QueueableCommand, cursor};

use super::view::frame;
use crate::args::{Order, TopArgs};
use crate::live::{Reading, States};

const KEYS: &str = "q quit   sort: r rank  d device  s stall  p pid   arrows scroll";

/// Shows the pages until a key ends it.
pub(super) fn show(args: &TopArgs, out: &mut dyn Write) -> io::Result<()> {
    let mut screen = Screen::open(out)?;
    let shown = screen.run(args);
    let closed = screen.close();
    shown.and(closed)
}

/// A terminal in raw mode on its alternate screen.
struct Screen<'a> {
    out: &'a mut dyn Write,
    order: Order,
    /// First line shown.
    top: usize,
    is_open: bool,
}

impl<'a> Screen<'a> {
    fn open(out: &'a mut dyn Write) -> io::Result<Self> {
        enable_raw_mode()?;
        let screen = Self { out, order: Order::default(), top: 0, is_open: true };
        screen.out.queue(EnterAlternateScreen)?.queue(cursor::Hide)?.flush()?;
        Ok(screen)
    }

    fn close(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_open) {
            self.out.queue(cursor::Show)?.queue(LeaveAlternateScreen)?.flush()?;
            disable_raw_mode()?;
        }
        Ok(())
    }

    fn run(&mut self, args: &TopArgs) -> io::Result<()> {
        let interval = Duration::from_millis(args.interval_ms);
        self.order = args.sort.unwrap_or_default();
        let mut before = Reading::of(&args.pages);
        let mut states = States::between(&before, &before);
        loop {
            let next = Instant::now() + interval;
            loop {
                self.draw(&mut states)?;
                if !poll(next.saturating_duration_since(Instant::now()))? {
                    break;
                }
                if let Event::Key(key) = read()?
                    && key.kind != KeyEventKind::Release
                    && self.is_last(key)
                {
                    return Ok(());
                }
            }
            let after = Reading::of(&args.pages);
            states = States::between(&before, &after);
            before = after;
        }
    }

    /// Obeys a key. Returns whether it ends the view.
    fn is_last(&mut self, key: KeyEvent) -> bool {
        let page = usize::from(size().map_or(1, |(_, rows)| rows)).saturating_sub(2).max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('r') => self.order = Order::Rank,
            KeyCode::Char('d') => self.order = Order::Device,
            KeyCode::Char('s') => self.order = Order::Stall,
            KeyCode::Char('p') => self.order = Order::Pid,
            KeyCode::Up => self.top = self.top.saturating_sub(1),
            KeyCode::Down => self.top += 1,
            KeyCode::PageUp => self.top = self.top.saturating_sub(page),
            KeyCode::PageDown => self.top += page,
            KeyCode::Home => self.top = 0,
            KeyCode::End => self.top = usize::MAX,
            _ => {}
        }
        false
    }

    fn draw(&mut self, states: &mut States) -> io::Result<()> {
        states.sort(self.order);
        let (columns, rows) = size()?;
        let rows = usize::from(rows.max(2)) - 1;
        let lines = frame(states, columns.into());
        self.top = self.top.min(lines.len().saturating_sub(rows));
        let shown = lines.iter().skip(self.top).take(rows);
        for (row, line) in (0_u16..).zip(shown) {
            self.out.queue(cursor::MoveTo(0, row))?.queue(Print(line))?;
            self.out.queue(Clear(ClearType::UntilNewLine))?;
        }
        let keys: String = KEYS.chars().take(columns.into()).collect();
        self.out.queue(Clear(ClearType::FromCursorDown))?;
        self.out.queue(cursor::MoveTo(0, rows as u16))?.queue(Print(keys))?;
        self.out.flush()
    }
}

impl Drop for Screen<'_> {
    fn drop(&mut self) {
        // An error was returned already, or a panic goes on: the terminal is left as well as it can be.
        let _ = self.close();
    }
}
