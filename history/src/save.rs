//! A history in a file, which is checked as a whole before it is believed.
//!
//! ```text
//! magic [8] · version u32 · vocab u32 · prompts u64
//! for each prompt, the least recently used first: digest u128 · bytes u64 · the prompt (format.rs)
//! CRC-32C of all of this u32
//! ```
//! Prompts go to the file and come from it one at a time: a history may be larger than memory.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read as _, Seek as _, Write as _};
use std::path::Path;

use crate::bytes::take;
use crate::digest::Digest;
use crate::error::HistoryError;
use crate::history::{History, Places};
use crate::limits::PROMPTS_MAX;
use crate::prompt::Prompt;
use crate::replace::replace;

const MAGIC: [u8; 8] = *b"dmhistry";
/// Version of the format. It counts up with every change.
pub const FILE_VERSION: u32 = 1;
/// Name of the history in a directory.
pub const FILE_NAME: &str = "history.dormouse";
const HEADER_BYTES: usize = 24;
/// Digest and length of a prompt.
const PROMPT_HEAD_BYTES: usize = 24;
const SUM_BYTES: usize = 4;
/// Bytes that are summed at a time.
const SUMMED_BYTES: usize = 1 << 16;

impl History {
    /// Saves everything. The file at `path` is replaced as a whole, or stays as it is. Other threads
    /// may record during the save; the file holds each prompt as it was at some moment of the save. Saves of one history
    /// wait for each other. A cold prompt that cannot be read is forgotten, and the others are saved.
    ///
    /// # Errors
    /// `File`.
    pub fn save(&self, path: &Path) -> Result<(), HistoryError> {
        const ACTION: &str = "saving";
        let failed = HistoryError::file(path, ACTION);
        let _one = self.saving.lock();
        let write = |file: &File| self.write(file, &failed);
        replace(path, ACTION, File::options().write(true), write)?.synced.map_err(&failed)
    }

    fn write(
        &self,
        mut file: &File,
        failed: impl Fn(io::Error) -> HistoryError,
    ) -> Result<(), HistoryError> {
        let mut writer = BufWriter::new(file);
        // The number of prompts is known in the end.
        writer.write_all(&[0; HEADER_BYTES]).map_err(&failed)?;
        let (mut count, mut bytes, mut sum) = (0_u64, 0, 0);
        let mut record = Vec::new();
        for digest in self.by_use() {
            let Some(prompt) = self.read(digest) else { continue };
            record.clear();
            record.extend_from_slice(&digest.0.to_le_bytes());
            record.extend_from_slice(&[0; size_of::<u64>()]);
            prompt.encode(&mut record);
            let own = ((record.len() - PROMPT_HEAD_BYTES) as u64).to_le_bytes();
            if let Some(place) = record.get_mut(size_of::<Digest>()..PROMPT_HEAD_BYTES) {
                place.copy_from_slice(&own);
            }
            sum = crc32c::crc32c_append(sum, &record);
            bytes += record.len();
            count += 1;
            writer.write_all(&record).map_err(&failed)?;
        }
        let mut header = MAGIC.to_vec();
        header.extend_from_slice(&FILE_VERSION.to_le_bytes());
        header.extend_from_slice(&self.options().vocab.to_le_bytes());
        header.extend_from_slice(&count.to_le_bytes());
        let sum = crc32c::crc32c_combine(crc32c::crc32c(&header), sum, bytes);
        writer.write_all(&sum.to_le_bytes()).map_err(&failed)?;
        writer.flush().map_err(&failed)?;
        drop(writer);
        file.rewind().and_then(|()| file.write_all(&header)).map_err(&failed)
    }

    /// Replaces everything by the history saved at `path`. Of a history that is larger than memory and the file of
    /// cold prompts, the least recently used prompts are forgotten.
    ///
    /// # Errors
    /// `File`; `Damaged` for a file that is cut, changed, of another version or of a larger vocabulary. Nothing
    /// changes then.
    pub fn load(&self, path: &Path) -> Result<(), HistoryError> {
        let mut places = Places::default();
        let read = self.read_into(&mut places, path);
        // What was there, or what was read of a refused file.
        let mut old = match read {
            Ok(()) => self.exchange(places),
            Err(_) => places,
        };
        self.clear(&mut old);
        read.map_err(|refusal| match refusal {
            Refusal::File(source) => HistoryError::file(path, "reading")(source),
            Refusal::Damaged(reason) => HistoryError::Damaged { path: path.to_owned(), reason },
        })
    }

    fn read_into(&self, places: &mut Places, path: &Path) -> Result<(), Refusal> {
        let mut file = File::open(path)?;
        let header = Header::read(&mut file, self.options().vocab)?;
        let mut rest = Rest { reader: BufReader::new(file), left: header.prompt_bytes };
        for _ in 0..header.prompts {
            let (digest, prompt) = rest.prompt(header.vocab)?;
            if !self.insert(places, digest, prompt) {
                return Err(format!("it has prompt {:032x} twice", digest.0).into());
            }
        }
        match rest.left {
            0 => Ok(()),
            left => Err(format!("it has {left} bytes after its prompts").into()),
        }
    }
}

/// Why a file was not read.
enum Refusal {
    File(io::Error),
    Damaged(String),
}

impl From<io::Error> for Refusal {
    fn from(source: io::Error) -> Self {
        Self::File(source)
    }
}

impl From<String> for Refusal {
    fn from(reason: String) -> Self {
        Self::Damaged(reason)
    }
}

struct Header {
    vocab: u32,
    prompts: u64,
    /// Bytes of the prompts.
    prompt_bytes: u64,
}

impl Header {
    /// Reads the header and sums the whole file, of which it leaves `file` at the first prompt.
    fn read(file: &mut File, vocab_max: u32) -> Result<Self, Refusal> {
        let bytes = file.metadata()?.len();
        let mut header = Vec::with_capacity(HEADER_BYTES);
        file.take(HEADER_BYTES as u64).read_to_end(&mut header)?;
        let mut rest = header.as_slice();
        if take::<8>(&mut rest)? != MAGIC {
            return Err(String::from("it does not begin as a history does").into());
        }
        let version = u32::from_le_bytes(take(&mut rest)?);
        if version != FILE_VERSION {
            let reads = format!("its version is {version}, and this release reads {FILE_VERSION}");
            return Err(reads.into());
        }
        let vocab = u32::from_le_bytes(take(&mut rest)?);
        let prompts = u64::from_le_bytes(take(&mut rest)?);
        let prompt_bytes = bytes.checked_sub((HEADER_BYTES + SUM_BYTES) as u64);
        let prompt_bytes = prompt_bytes.ok_or_else(|| String::from("it has no checksum"))?;
        let found = sum_of(file, prompt_bytes, crc32c::crc32c(&header))?;
        let mut sum = [0; SUM_BYTES];
        file.read_exact(&mut sum)?;
        let sum = u32::from_le_bytes(sum);
        if sum != found {
            let sums = format!("its checksum is {found:08x}, and it was saved with {sum:08x}");
            return Err(sums.into());
        }
        if vocab > vocab_max {
            let larger = format!("its vocabulary has {vocab} tokens, and this one {vocab_max}");
            return Err(larger.into());
        }
        if prompts > PROMPTS_MAX as u64 {
            return Err(format!("it has {prompts} prompts").into());
        }
        file.seek(io::SeekFrom::Start(HEADER_BYTES as u64))?;
        Ok(Self { vocab, prompts, prompt_bytes })
    }
}

/// Returns the checksum of the next `bytes` behind that of what is before them.
fn sum_of(file: &mut File, bytes: u64, before: u32) -> io::Result<u32> {
    let (mut sum, mut left, mut part) = (before, bytes, vec![0; SUMMED_BYTES]);
    while left > 0 {
        let (now, _) = part.split_at_mut(left.min(SUMMED_BYTES as u64) as usize);
        file.read_exact(now)?;
        sum = crc32c::crc32c_append(sum, now);
        left -= now.len() as u64;
    }
    Ok(sum)
}

/// The prompts that are left.
struct Rest {
    reader: BufReader<File>,
    left: u64,
}

impl Rest {
    fn prompt(&mut self, vocab: u32) -> Result<(Digest, Prompt), Refusal> {
        let head = self.bytes(PROMPT_HEAD_BYTES as u64)?;
        let mut head = head.as_slice();
        let digest = Digest(u128::from_le_bytes(take(&mut head)?));
        let own = self.bytes(u64::from_le_bytes(take(&mut head)?))?;
        Ok((digest, Prompt::decode(&own, vocab)?))
    }

    fn bytes(&mut self, count: u64) -> Result<Vec<u8>, Refusal> {
        let left = self.left.checked_sub(count);
        self.left = left.ok_or_else(|| format!("{count} bytes of a prompt of {}", self.left))?;
        let mut own = Vec::new();
        self.reader.by_ref().take(count).read_to_end(&mut own)?;
        Ok(own)
    }
}
