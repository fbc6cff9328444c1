//! The division of one request into pieces, and the effect of each result. Pure: no I/O, no memory.
//!
//! ```text
//! request  |------------------------------| len
//! pieces   |--------|--------|--------|---|     issued in order, in flight together
//! short    |--------|####....|                  the rest is issued again
//! ```

use std::io;

use crate::direction::Direction;
use crate::error::{Error, ErrorKind, Result};

/// Number of times that a failed piece of a read is sent again. A drive has tried long before it
/// reports an error, so more tries would only delay the report; but a timeout on the way may pass.
const READS_AGAIN_MAX: u32 = 3;
/// Number of tries in a row for a piece that neither moves bytes nor fails for good. They take
/// milliseconds, and a kernel that says "again" a thousand times will say it for ever.
const ATTEMPTS_MAX: u32 = 1000;

/// A part of a request, small enough for one system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte, counted from the start of the request.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
    attempt_count: u32,
    failed_count: u32,
}

/// The state of one request on its way through an engine.
#[derive(Debug)]
pub struct Progress {
    direction: Direction,
    len: usize,
    piece_len: usize,
    alignment: usize,
    /// Offset of the request in the file, for messages.
    offset: u64,
    issued: usize,
    in_flight: usize,
    again: Vec<Piece>,
    failure: Option<Error>,
}

impl Progress {
    /// A request of `len` bytes at `offset` of its file, in pieces of at most `piece_len`.
    pub fn new(
        direction: Direction,
        offset: u64,
        len: usize,
        piece_len: usize,
        alignment: usize,
    ) -> Self {
        debug_assert!(piece_len.is_multiple_of(alignment));
        let (issued, in_flight, again, failure) = (0, 0, Vec::new(), None);
        Self { direction, len, piece_len, alignment, offset, issued, in_flight, again, failure }
    }

    /// The next piece to send, if there is one now.
    pub fn next_piece(&mut self) -> Option<Piece> {
        if self.failure.is_some() {
            return None;
        }
        let piece = self.again.pop().or_else(|| {
            let start = self.issued;
            let len = self.piece_len.min(self.len - start);
            self.issued += len;
            (len > 0).then_some(Piece { start, len, attempt_count: 0, failed_count: 0 })
        })?;
        self.in_flight += 1;
        Some(piece)
    }

    /// Returns true if [`Progress::next_piece`] would return a piece.
    pub fn has_next(&self) -> bool {
        self.failure.is_none() && (!self.again.is_empty() || self.issued < self.len)
    }

    /// Takes the kernel's result for a piece: bytes moved, or an error.
    ///
    /// # Panics
    /// If no piece is in flight: the engine counted wrong.
    pub fn finish(&mut self, piece: Piece, result: io::Result<usize>) {
        assert!(self.in_flight > 0, "a result for a piece that was not sent");
        self.in_flight -= 1;
        match result {
            Ok(moved) if moved == piece.len => {}
            Ok(moved) if moved > piece.len => self.fail(piece, "moved more bytes than asked", None),
            Ok(0) => self.fail(piece, "moved no bytes: the file ends here", None),
            Ok(moved) => {
                // Direct I/O can go on only at an aligned offset.
                let moved = moved - moved % self.alignment;
                // Progress resets the number of tries.
                let attempt_count = if moved > 0 { 0 } else { piece.attempt_count };
                let (start, len) = (piece.start + moved, piece.len - moved);
                self.retry(Piece { start, len, attempt_count, ..piece });
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => self.retry(piece),
                // After a failed write the tensor stays in memory; a failed read costs the whole
                // step. An error without an errno comes from a library.
                Some(libc::EIO | libc::ETIMEDOUT) | None
                    if self.direction == Direction::Read
                        && piece.failed_count < READS_AGAIN_MAX =>
                {
                    self.retry(Piece { failed_count: piece.failed_count + 1, ..piece });
                }
                _ => self.fail(piece, "failed", Some(&error)),
            },
        }
    }

    /// Stops sending pieces, because the request was cancelled.
    pub fn abandon(&mut self) {
        if self.has_next() {
            self.failure = Some(Error::new(ErrorKind::Cancelled, "cancelled on its way"));
        }
    }

    /// The outcome, once nothing is in flight and nothing is left to send.
    pub fn outcome(&mut self) -> Option<Result<()>> {
        if self.in_flight > 0 || self.has_next() {
            return None;
        }
        Some(self.failure.take().map_or(Ok(()), Err))
    }

    fn retry(&mut self, piece: Piece) {
        if piece.attempt_count >= ATTEMPTS_MAX {
            self.fail(piece, "made no progress in 1000 tries", None);
        } else {
            let attempt_count = piece.attempt_count + 1;
            self.again.push(Piece { attempt_count, ..piece });
        }
    }

    fn fail(&mut self, piece: Piece, how: &str, source: Option<&io::Error>) {
        let verb = match self.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let message = format!(
            "{verb} of {} bytes at file offset {} {how}",
            piece.len,
            self.offset + piece.start as u64
        );
        let error = match source {
            Some(source) => Error::from_io(message, source),
            None => Error::new(ErrorKind::Io, message),
        };
        self.failure.get_or_insert(error);
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;
    use crate::direction::Direction;
    use crate::error::ErrorKind;
    use proptest::prelude::*;
    use std::io;

    #[test]
    fn the_first_failure_is_the_answer() {
        let mut progress = Progress::new(Direction::Write, 4096, 3 << 20, 1 << 20, 512);
        let pieces: Vec<_> = std::iter::from_fn(|| progress.next_piece()).collect();
        assert_eq!(pieces.len(), 3);
        progress.finish(pieces[1], Err(io::Error::from_raw_os_error(libc::EIO)));
        progress.finish(pieces[0], Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert!(progress.outcome().is_none());
        progress.finish(pieces[2], Ok(1 << 20));
        let error = progress.outcome().unwrap().unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::Io, Some(libc::EIO)));
        assert!(error.to_string().contains("offset 1052672"), "{error}");
    }

    #[test]
    fn a_failed_read_is_asked_for_again_but_a_failed_write_is_not() {
        let failed = || Err(io::Error::from_raw_os_error(libc::EIO));
        let mut write = Progress::new(Direction::Write, 0, 4096, 4096, 512);
        let piece = write.next_piece().unwrap();
        write.finish(piece, failed());
        assert_eq!(write.outcome().unwrap().unwrap_err().errno(), Some(libc::EIO));
        let mut read = Progress::new(Direction::Read, 0, 4096, 4096, 512);
        for _ in 0..super::READS_AGAIN_MAX {
            let piece = read.next_piece().unwrap();
            read.finish(piece, failed());
            assert!(read.outcome().is_none());
        }
        let piece = read.next_piece().unwrap();
        read.finish(piece, Ok(4096));
        assert!(read.outcome().unwrap().is_ok());
    }

    #[test]
    fn no_bytes_is_a_failure_and_not_a_loop() {
        let mut progress = Progress::new(Direction::Read, 0, 4096, 4096, 512);
        let piece = progress.next_piece().unwrap();
        progress.finish(piece, Ok(0));
        assert_eq!(progress.outcome().unwrap().unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn a_device_that_never_moves_is_a_failure() {
        let mut progress = Progress::new(Direction::Read, 0, 4096, 4096, 512);
        for _ in 0..=super::ATTEMPTS_MAX {
            let piece = progress.next_piece().unwrap();
            progress.finish(piece, Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        }
        assert!(progress.outcome().unwrap().is_err());
    }

    proptest! {
        /// For all sizes and orders of the kernel's results, each byte moves exactly once, aligned.
        #[test]
        fn every_byte_moves_exactly_once(
            blocks in 1usize..400,
            piece_blocks in 1usize..20,
            moves in proptest::collection::vec((any::<u16>(), any::<u16>()), 1..60),
        ) {
            let (alignment, len) = (512, blocks * 512);
            let piece_len = piece_blocks * alignment;
            let mut progress = Progress::new(Direction::Write, 0, len, piece_len, alignment);
            let mut moved = vec![0u8; len / alignment];
            let (mut flying, mut choices) = (Vec::new(), moves.iter().cycle());
            let mut full_after = 900;
            while progress.outcome().is_none() {
                let (order, amount) = choices.next().unwrap();
                while let Some(piece) = progress.next_piece() { flying.push(piece); }
                let piece = flying.swap_remove(*order as usize % flying.len());
                prop_assert_eq!(piece.start % alignment, 0);
                full_after -= 1;
                let some = (*amount as usize % piece.len) + 1;
                let count = if full_after < 0 { piece.len } else { some };
                for block in 0..count / alignment { moved[piece.start / alignment + block] += 1; }
                progress.finish(piece, Ok(count));
            }
            prop_assert!(moved.iter().all(|&count| count == 1));
        }
    }
}
