//! The direction of a transfer.

/// The direction in which bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the disk into memory.
    Read,
    /// From memory to the disk.
    Write,
}
