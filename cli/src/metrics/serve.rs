//! The page over HTTP, to programs of this machine alone: one request at a time, of one kind.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{current, page};
use crate::{Error, Output};

/// Limit of a request's lines, in bytes.
const REQUEST_BYTES_MAX: u64 = 8 << 10;
/// A client that takes longer loses its connection: the next one waits for it.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves the page at `/metrics` until the program is ended.
pub(super) fn serve(
    address: SocketAddr,
    pages: &[PathBuf],
    out: &mut dyn Write,
) -> Result<Output, Error> {
    let listener =
        TcpListener::bind(address).map_err(|source| Error::Listen { address, source })?;
    let address = listener.local_addr().unwrap_or(address);
    writeln!(out, "http://{address}/metrics").and_then(|()| out.flush()).map_err(Error::Print)?;
    for client in listener.incoming() {
        // A client that leaves, or sends what is no request, is its own affair.
        let _answered = client.and_then(|stream| answer(Client::new(stream), pages));
    }
    Ok(Output::of(String::new()))
}

/// A connection until its deadline.
struct Client {
    stream: TcpStream,
    deadline: Instant,
}

impl Client {
    fn new(stream: TcpStream) -> Self {
        Self { stream, deadline: Instant::now() + CLIENT_TIMEOUT }
    }

    /// Returns the time left, which is never zero.
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for &Client {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        (&self.stream).read(buffer)
    }
}

impl Write for &Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        (&self.stream).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&self.stream).flush()
    }
}

fn answer(client: Client, pages: &[PathBuf]) -> io::Result<()> {
    let mut lines = BufReader::new((&client).take(REQUEST_BYTES_MAX));
    let mut request = String::new();
    lines.read_line(&mut request)?;
    // Until the empty line: a client may not read an answer before it has sent all of its request.
    let mut line = String::new();
    while lines.read_line(&mut line)? > 0 && !line.trim_end().is_empty() {
        line.clear();
    }
    let (status, kind, text) = match answer_to(&request) {
        Answer::Page => ("200 OK", page::MEDIA_TYPE, current(pages)),
        Answer::Other => ("404 Not Found", "text/plain", "accepted: /metrics\n".to_owned()),
        Answer::Method => ("405 Method Not Allowed", "text/plain", "accepted: GET\n".to_owned()),
    };
    let length = text.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
    );
    (&client).write_all(answer.as_bytes())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Page,
    Other,
    Method,
}

/// Returns what a request's first line asks for.
fn answer_to(line: &str) -> Answer {
    let mut words = line.split_ascii_whitespace();
    let (method, target) = (words.next(), words.next().unwrap_or_default());
    match (method, target.split('?').next()) {
        (Some("GET"), Some("/metrics")) => Answer::Page,
        (Some("GET"), _) => Answer::Other,
        _ => Answer::Method,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_page_is_served() {
        assert_eq!(answer_to("GET /metrics HTTP/1.1\r\n"), Answer::Page);
        assert_eq!(answer_to("GET /metrics?x=1 HTTP/1.1"), Answer::Page);
        assert_eq!(answer_to("GET / HTTP/1.1"), Answer::Other);
        assert_eq!(answer_to("GET /metricsx HTTP/1.1"), Answer::Other);
        assert_eq!(answer_to("POST /metrics HTTP/1.1"), Answer::Method);
        assert_eq!(answer_to(""), Answer::Method);
    }
}
