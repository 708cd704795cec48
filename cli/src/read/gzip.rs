//! Gzip, with a limit on what it inflates to.

use std::io::{self, BufRead, ErrorKind, Read};

use flate2::bufread::MultiGzDecoder;

/// The first bytes of a gzip file.
pub(super) const MAGIC: &[u8] = &[0x1f, 0x8b];
/// Maximum inflated bytes of a file: the ids of the largest batch in text. Small in tests, which reach it.
const INFLATED_BYTES_MAX: u64 = if cfg!(test) { 1 << 12 } else { 1 << 36 };

/// The inflated bytes of a gzip file of one or more members.
#[derive(Debug)]
pub(super) struct Inflated<R> {
    input: MultiGzDecoder<R>,
    left: u64,
}

impl<R: BufRead> Inflated<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input: MultiGzDecoder::new(input), left: INFLATED_BYTES_MAX }
    }
}

impl<R: BufRead> Read for Inflated<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(into)?;
        let Some(left) = self.left.checked_sub(read as u64) else {
            let text = format!(
                "more than {INFLATED_BYTES_MAX} bytes when inflated; accepted: at most that"
            );
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        };
        self.left = left;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn inflated(bytes: u64) -> io::Result<Vec<u8>> {
        let mut file = GzEncoder::new(Vec::new(), Compression::best());
        let text = vec![b'\n'; bytes as usize];
        file.write_all(&text).unwrap();
        let file = file.finish().unwrap();
        assert!(file.len() < 100, "a bomb is small: {}", file.len());
        let mut all = Vec::new();
        Inflated::new(&file[..]).read_to_end(&mut all).map(|_| all)
    }

    #[test]
    fn a_bomb_is_refused_at_the_limit() {
        assert_eq!(inflated(INFLATED_BYTES_MAX).unwrap().len() as u64, INFLATED_BYTES_MAX);
        let refused = inflated(INFLATED_BYTES_MAX + 1).unwrap_err().to_string();
        assert_eq!(refused, "more than 4096 bytes when inflated; accepted: at most that");
    }
}
