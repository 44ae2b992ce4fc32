//! A stream behind the interface of a file: whole batches, copied into the caller's buffer.

use crate::error::Error;
use crate::opening::{Options, open};
use crate::stream::Stream;

/// Reads whole batches into `buf`, as many as fit, and returns the bytes read; 0 at the end. If
/// `action` or `offload` differ from those of the stream, they take effect at the next batch.
///
/// # Errors
/// As [`Stream::next_view`] and [`open`]; and when `buf` holds no whole batch.
pub fn read(file: &mut File, buf: &mut [u8], action: &str, offload: bool) -> Result<usize, Error> {
    file.ensure(action, offload)?;
    let size = file.stream.batch_bytes();
    if buf.len() < size {
        return Err(Error::SmallBuffer { have: buf.len(), need: size });
    }
    let mut filled = 0;
    while filled + size <= buf.len() {
        let Some(batch) = file.stream.next_view()? else {
            break;
        };
        buf[filled..filled + size].copy_from_slice(batch.bytes());
        filled += size;
    }
    Ok(filled)
}

/// A stream with the file interface of [`read`].
#[derive(Debug)]
pub struct File {
    url: String,
    action: String,
    offload: bool,
    options: Options,
    stream: Stream,
}

impl File {
    /// Opens `url` with an action.
    ///
    /// # Errors
    /// As [`open`].
    pub fn open(url: &str, action: &str, offload: bool, options: &Options) -> Result<File, Error> {
        let stream = open(url, action, offload, options)?;
        let (url, action) = (url.to_owned(), action.to_owned());
        Ok(File { url, action, offload, options: options.clone(), stream })
    }

    fn ensure(&mut self, action: &str, offload: bool) -> Result<(), Error> {
        if self.action == action && self.offload == offload {
            return Ok(());
        }
        let first_batch = self.stream.next_batch();
        let ranks = u64::from(self.options.rank.ranks.max(1));
        let delivered = first_batch.saturating_sub(self.options.first_batch) / ranks;
        let options = Options {
            first_batch,
            batches: self.options.batches.map(|count| count.saturating_sub(delivered)),
            ..self.options.clone()
        };
        *self = File::open(&self.url, action, offload, &options)?;
        Ok(())
    }
}
