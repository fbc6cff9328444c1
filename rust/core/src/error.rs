//! What can go wrong, as a kind, a sentence and, where the kernel spoke, its errno.
//!
//! A message says what, where, why and what next. Errors are `Clone` because several waiters may
//! ask the same ticket.

use std::fmt;
use std::io;

/// The class of an [`Error`]; the Python boundary maps each to one exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// An argument or a directory is not usable as given.
    Config,
    /// The kernel or the device refused or failed an operation.
    Io,
    /// The disk, or the user's quota on it, has no room.
    NoSpace,
    /// `max_disk_bytes` has no room.
    OverBound,
    /// Bytes came back that are not the bytes that were written.
    Corrupt,
    /// The kernel, the file system or the build lacks what was asked for.
    Unsupported,
    /// The store was closed, or belongs to another process.
    Closed,
    /// A worker died; nothing it held can be trusted.
    Poisoned,
    /// The operation was cancelled before it began.
    Cancelled,
    /// The submission queue is full: try again, or keep the tensor.
    Busy,
}

/// An error of the store.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    errno: Option<i32>,
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error of `kind` whose message says what, where, why and what next.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), errno: None }
    }

    /// An error that carries the kernel's errno; out of space gets its own kind.
    pub fn from_io(message: impl fmt::Display, source: &io::Error) -> Self {
        let errno = source.raw_os_error();
        let kind = match errno {
            // EFBIG: a file-size limit is a full disk in another coat.
            Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Self { kind, message: format!("{message}: {source}"), errno }
    }

    /// The same error with another class.
    #[must_use]
    pub fn with_kind(self, kind: ErrorKind) -> Self {
        Self { kind, ..self }
    }

    /// The same error with something added to its message.
    #[must_use]
    pub fn with_note(self, note: &str) -> Self {
        Self { message: format!("{}{note}", self.message), ..self }
    }

    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The kernel's errno, where there is one.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
