//! A connection whose other end has to read, and which is read slowly while it is a stranger's.
//!
//! Once a response waits for the client, the client has a while to take all of it. Time for headers
//! and bodies of requests is limited elsewhere.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::places::{Activity, Allowance};

/// See the module's text. A write that is late fails with [`io::ErrorKind::TimedOut`].
#[derive(Debug)]
pub(super) struct Guarded<S> {
    stream: S,
    activity: Arc<Activity>,
    allowance: Allowance,
    patience: Duration,
    /// When the response has to be with the client; `None` while nothing waits.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S> Guarded<S> {
    pub(super) fn new(stream: S, activity: Arc<Activity>, patience: Duration) -> Guarded<S> {
        Guarded { stream, activity, allowance: Allowance::default(), patience, deadline: None }
    }

    /// Passes on what a write said, unless it has waited for too long.
    fn guard<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            return written;
        }
        let patience = self.patience;
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(patience)));
        match deadline.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let stream = Pin::new(&mut this.stream);
        ready!(this.allowance.poll_read(&this.activity, stream, cx, into))?;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.guard(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bytes);
        self.guard(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if flushed.is_ready() {
            // HTTP flushes after it has written all that it had.
            self.deadline = None;
        }
        self.guard(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.guard(closed, cx)
    }
}
