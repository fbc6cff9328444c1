//! The threads of [`crate::engine::psync`] in front of cuFile, whose calls wait like `pread`.

use std::io;
use std::sync::Arc;

use crate::cufile::file::Registered;
use crate::direction::Direction;
use crate::disk::spill_file::SpillFile;
use crate::engine::batch::{Batch, Spans};
use crate::engine::progress::Piece;
use crate::engine::psync::Disk;

/// A file to and from which cuFile moves bytes.
pub struct CuFile {
    // In this order, so that the registration ends before the file is closed.
    registered: Registered,
    _file: Arc<SpillFile>,
}

impl CuFile {
    /// Serves a registered file.
    pub fn new(registered: Registered, file: &Arc<SpillFile>) -> Self {
        Self { registered, _file: Arc::clone(file) }
    }

    /// Moves runs of memory that follow each other in the file. If a run fails, the bytes of the
    /// runs before it count.
    fn transfer_all(
        &self,
        direction: Direction,
        runs: impl Iterator<Item = (u64, usize)>,
        mut offset: u64,
    ) -> io::Result<usize> {
        let mut moved_bytes = 0;
        for (address, len) in runs {
            match self.registered.transfer(direction, address, len, offset) {
                Ok(moved) => {
                    moved_bytes += moved;
                    if moved < len {
                        break;
                    }
                }
                Err(error) if moved_bytes == 0 => return Err(error),
                // The rest of the piece is sent again; if it fails then, that error is the answer.
                Err(_later) => break,
            }
            offset += len as u64;
        }
        Ok(moved_bytes)
    }
}

impl Disk for CuFile {
    fn name(&self) -> &'static str {
        "cufile"
    }

    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize> {
        let offset = batch.offset(piece);
        match batch.spans(piece) {
            Spans::Into(spans) => {
                let runs = spans.iter().map(|span| (span.address as u64, span.len));
                self.transfer_all(Direction::Read, runs, offset)
            }
            Spans::From(spans) => {
                let runs = spans.iter().map(|span| (span.address as u64, span.len));
                self.transfer_all(Direction::Write, runs, offset)
            }
        }
    }
}
