//! Errors: a kind, a sentence and, if the kernel answered, its errno.
//!
//! A message names the operation, the place, the cause and the next step. Errors are `Clone`
//! because several threads may ask the same ticket.

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
    /// The bytes that were read are not the bytes that were written.
    Corrupt,
    /// The kernel, the file system or the build lacks a requested feature.
    Unsupported,
    /// The store was closed, or belongs to another process.
    Closed,
    /// A worker died; nothing that it held can be trusted.
    Poisoned,
    /// The operation was cancelled before it began.
    Cancelled,
    /// The submission queue is full: try again, or keep the tensor.
    Busy,
    /// The CUDA driver refused or failed an operation.
    Cuda,
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
    /// An error of `kind`. Its message names the operation, the place, the cause and the next step.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), errno: None }
    }

    /// An error that carries the kernel's errno; out of space gets its own kind.
    pub fn from_io(message: impl fmt::Display, source: &io::Error) -> Self {
        let errno = source.raw_os_error();
        let kind = match errno {
            // EFBIG: a limit on the file's size is treated like a full disk.
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

    /// The same error with `note` added to its message.
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

/// A size as messages write it, `"71.2 MiB"`; the same as `ssdtrain.sizes.shown_bytes` in Python.
#[must_use]
pub fn shown_bytes(bytes: u64) -> String {
    if bytes < 1 << 10 {
        return if bytes == 1 { "1 byte".into() } else { format!("{bytes} bytes") };
    }
    let mut size = bytes as f64;
    let mut shown = "";
    for unit in ["KiB", "MiB", "GiB", "TiB"] {
        // Compares the rounded figure, so that no size is shown as 1024 of the smaller unit.
        if !shown.is_empty() && (size * 10.0).round() < 10_240.0 {
            break;
        }
        size /= 1024.0;
        shown = unit;
    }
    let figure = format!("{size:.1}");
    format!("{} {shown}", figure.strip_suffix(".0").unwrap_or(&figure))
}

#[cfg(test)]
mod tests {
    use super::shown_bytes;

    #[test]
    fn a_size_is_shown_as_in_python() {
        for (bytes, shown) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (64 << 20, "64 MiB"),
            ((1 << 20) - 1, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (1 << 60, "1048576 TiB"),
        ] {
            assert_eq!(shown_bytes(bytes), shown);
        }
    }
}
