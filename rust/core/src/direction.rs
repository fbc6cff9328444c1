//! Which way bytes go.

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the disk into memory.
    Read,
    /// From memory to the disk.
    Write,
}
