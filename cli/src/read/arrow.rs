//! Arrow IPC files and streams, message by message.
//!
//! The readers of the `arrow-ipc` crate cannot check a message before decoding it, so this module cuts the
//! messages, checks them and passes them to the crate's decoders. A stream may end without an end marker.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::sync::Arc;

use arrow_ipc::convert::try_fb_to_schema;
use arrow_ipc::reader::{FileDecoder, StreamDecoder, read_footer_length};
use arrow_ipc::{Block, root_as_footer, root_as_message};

use super::columns::Columns;
use super::message::{check_message, little_endian};
use super::{ReadError, Task};

/// The marker before the length of a message, and the size of both.
const CONTINUATION: [u8; 4] = [0xff; 4];
const PREFIX_BYTES: usize = 8;
/// The end marker of a stream: a message of length 0.
const END: [u8; PREFIX_BYTES] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];
/// Size of the footer length and the magic bytes at the end of a file.
const TAIL_BYTES: u64 = 10;
/// Maximum bytes allocated at once for a claimed length.
const TRUSTED_BYTES: u64 = 1 << 26;

impl Task<'_> {
    /// Reads an Arrow file; decodes only the needed columns.
    pub(super) fn arrow_file(&mut self, input: File) -> Result<(), ReadError> {
        let mut source = Source { file: self.file, input };
        let refuse = |source| self.refuse(source);
        let bytes = source.footer()?;
        let footer = root_as_footer(&bytes).map_err(|error| source.no_part("footer", error))?;
        let schema = footer.schema().ok_or_else(|| source.no_part("schema", "none"))?;
        little_endian(&schema).map_err(|what| source.damaged(what))?;
        let schema = Arc::new(try_fb_to_schema(schema).map_err(refuse)?);
        let indices: Vec<usize> =
            Columns::find(self.file, self.names, &schema)?.indices().collect();
        let shown = schema.project(&indices).map_err(refuse)?;
        let mut columns = Columns::find(self.file, self.names, &shown)?;
        let mut decoder = FileDecoder::new(schema, footer.version()).with_projection(indices);
        for block in footer.dictionaries().iter().flatten() {
            let bytes = source.block(block)?;
            decoder.read_dictionary(block, &bytes.into()).map_err(refuse)?;
        }
        let blocks = footer.recordBatches();
        let count = blocks.map_or(0, |blocks| blocks.len() as u64);
        for (number, block) in (1..).zip(blocks.iter().flatten()) {
            let bytes = source.block(block)?;
            let batch = decoder.read_record_batch(block, &bytes.into());
            if let Some(batch) = batch.map_err(|source| self.refuse(source))? {
                columns.take(&batch, self.sequences)?;
            }
            self.bar.at_part(number, count);
        }
        Ok(())
    }

    /// Reads an Arrow stream.
    pub(super) fn arrow_stream(&mut self, input: impl Read) -> Result<(), ReadError> {
        let mut source = Source { file: self.file, input };
        let mut decoder = StreamDecoder::new();
        let mut columns = None;
        loop {
            let message = source.message()?;
            let is_last = message.is_none();
            // The decoder processes a message without a body only when more bytes follow.
            let mut bytes = message.unwrap_or_else(|| END.to_vec()).into();
            loop {
                let batch = decoder.decode(&mut bytes);
                let batch = batch.map_err(|source| self.refuse(source))?;
                if let (None, Some(schema)) = (&columns, decoder.schema()) {
                    columns = Some(Columns::find(self.file, self.names, &schema)?);
                }
                if let (Some(batch), Some(columns)) = (batch, &mut columns) {
                    columns.take(&batch, self.sequences)?;
                }
                if bytes.is_empty() {
                    break;
                }
            }
            if is_last {
                return source.nothing_more();
            }
        }
    }
}

/// The source of messages.
struct Source<'a, R> {
    file: &'a str,
    input: R,
}

impl Source<'_, File> {
    fn footer(&mut self) -> Result<Vec<u8>, ReadError> {
        let size = self.input.seek(SeekFrom::End(0)).map_err(|source| self.io(source))?;
        let tail = self.piece(size.checked_sub(TAIL_BYTES), Some(TAIL_BYTES))?;
        let length = tail.first_chunk().map(|tail| read_footer_length(*tail));
        let length = length.and_then(Result::ok).map(|length| length as u64);
        let begin = length.and_then(|length| (size - TAIL_BYTES).checked_sub(length));
        if begin.is_none() {
            return Err(self.damaged("it does not end with an Arrow footer".to_owned()));
        }
        self.piece(begin, length)
    }

    /// Reads and checks a block.
    fn block(&mut self, block: &Block) -> Result<Vec<u8>, ReadError> {
        let [begin, head, body] =
            [block.offset(), block.metaDataLength().into(), block.bodyLength()]
                .map(|it| u64::try_from(it).ok());
        let length = head.zip(body).and_then(|(head, body)| head.checked_add(body));
        let bytes = self.piece(begin, length)?;
        // The oldest files have no marker before the length.
        let prefix = if bytes.starts_with(&CONTINUATION) { PREFIX_BYTES } else { PREFIX_BYTES / 2 };
        let message = bytes.get(prefix..).unwrap_or_default();
        let body = bytes.get(head.unwrap_or(0) as usize..).unwrap_or_default();
        check_message(message, body).map_err(|what| self.damaged(what))?;
        Ok(bytes)
    }

    /// Reads a range of the file.
    fn piece(&mut self, begin: Option<u64>, length: Option<u64>) -> Result<Vec<u8>, ReadError> {
        let Some((begin, length)) = begin.zip(length) else {
            return Err(self.damaged("it refers to an invalid range of itself".to_owned()));
        };
        self.input.seek(SeekFrom::Start(begin)).map_err(|source| self.io(source))?;
        let mut bytes = Vec::new();
        self.append(&mut bytes, length)?;
        Ok(bytes)
    }
}

impl<R: Read> Source<'_, R> {
    /// Reads and checks the next message of a stream, with prefix and body; `None` at the end.
    fn message(&mut self) -> Result<Option<Vec<u8>>, ReadError> {
        let mut bytes = Vec::new();
        let prefix = self.input.by_ref().take(PREFIX_BYTES as u64).read_to_end(&mut bytes);
        prefix.map_err(|source| self.io(source))?;
        if bytes.is_empty() || bytes == END {
            return Ok(None);
        }
        let length = bytes.strip_prefix(&CONTINUATION).and_then(|length| length.try_into().ok());
        let Some(length) = length.map(u32::from_le_bytes) else {
            let seen = bytes.escape_ascii();
            return Err(self.damaged(format!("`{seen}` instead of a message")));
        };
        self.append(&mut bytes, length.into())?;
        let metadata = PREFIX_BYTES..bytes.len();
        let message = root_as_message(&bytes[metadata.clone()]);
        let body_bytes = message.map_err(|error| self.no_part("message", error))?.bodyLength();
        self.append(&mut bytes, u64::try_from(body_bytes).unwrap_or(u64::MAX))?;
        let (head, body) = bytes.split_at(metadata.end);
        check_message(&head[metadata], body).map_err(|what| self.damaged(what))?;
        Ok(Some(bytes))
    }

    /// Checks that nothing follows the end of the stream.
    fn nothing_more(&mut self) -> Result<(), ReadError> {
        match self.input.read(&mut [0]).map_err(|source| self.io(source))? {
            0 => Ok(()),
            _ => Err(self.damaged("something follows the end of its stream".to_owned())),
        }
    }

    /// Appends `length` bytes, allocating little more than what arrives.
    fn append(&mut self, bytes: &mut Vec<u8>, length: u64) -> Result<(), ReadError> {
        let seen = match bytes.try_reserve_exact(length.min(TRUSTED_BYTES) as usize) {
            Ok(()) => self.input.by_ref().take(length).read_to_end(bytes),
            Err(error) => Err(io::Error::new(ErrorKind::OutOfMemory, error)),
        };
        let seen = seen.map_err(|source| self.io(source))? as u64;
        if seen < length {
            return Err(
                self.damaged(format!("it ends after {seen} of {length} bytes of a message"))
            );
        }
        Ok(())
    }

    fn io(&self, source: io::Error) -> ReadError {
        ReadError::Io { file: self.file.to_owned(), source }
    }

    fn no_part(&self, part: &str, why: impl std::fmt::Display) -> ReadError {
        self.damaged(format!("its {part} is invalid: {why}"))
    }

    fn damaged(&self, what: String) -> ReadError {
        ReadError::Damaged { file: self.file.to_owned(), what }
    }
}
