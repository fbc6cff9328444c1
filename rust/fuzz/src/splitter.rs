//! Whatever a kernel answers, in whatever order: a request ends well only if each of its blocks
//! moved exactly once, and otherwise with its first failure.
#![no_main]

use std::collections::HashMap;
use std::io;

use libfuzzer_sys::fuzz_target;
use ssdtrain_core::ErrorKind;
use ssdtrain_core::direction::Direction;
use ssdtrain_core::engine::progress::{Piece, Progress};

/// What the splitter may know about a request, and what only the model knows.
struct Model {
    direction: Direction,
    alignment: usize,
    piece_len: usize,
    moved: Vec<u8>,
    flying: Vec<Piece>,
    /// How often the disk failed to read a piece, by where it ends: what is left of it ends there
    /// too.
    failed_reads: HashMap<usize, u32>,
    /// The kind of the first failure, and its errno.
    failure: Option<(ErrorKind, Option<i32>)>,
}

impl Model {
    fn take_pieces(&mut self, progress: &mut Progress, count: usize) {
        for _ in 0..count {
            let (has_next, piece) = (progress.has_next(), progress.next_piece());
            assert_eq!(has_next, piece.is_some());
            let Some(piece) = piece else { return };
            assert!(self.failure.is_none(), "a failed request sends no more");
            assert!(piece.len > 0 && piece.len <= self.piece_len);
            assert_eq!((piece.start % self.alignment, piece.len % self.alignment), (0, 0));
            let end = piece.start + piece.len;
            assert!(end <= self.moved.len() * self.alignment);
            for other in &self.flying {
                assert!(end <= other.start || other.start + other.len <= piece.start, "overlap");
            }
            self.flying.push(piece);
        }
    }

    fn answer(&mut self, progress: &mut Progress, which: u8, how: u8, amount: u16) {
        if self.flying.is_empty() {
            return;
        }
        let piece = self.flying.swap_remove(which as usize % self.flying.len());
        let errno = |errno| Err(io::Error::from_raw_os_error(errno));
        let result = match how % 16 {
            0 => errno(libc::EINTR),
            1 => errno(libc::EAGAIN),
            2 if amount.is_multiple_of(8) => errno([libc::EIO, libc::ENOSPC][how as usize / 128]),
            3 if amount.is_multiple_of(8) => Ok(0),
            4 if amount.is_multiple_of(8) => Ok(piece.len + 1 + amount as usize),
            5..12 => Ok(1 + amount as usize % piece.len),
            _ => Ok(piece.len),
        };
        let failure = match &result {
            Ok(count) if (1..=piece.len).contains(count) => {
                let first = piece.start / self.alignment;
                self.moved[first..first + count / self.alignment]
                    .iter_mut()
                    .for_each(|at| *at += 1);
                None
            }
            Ok(_) => Some((ErrorKind::Io, None)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EIO) if self.is_read_again(&piece) => None,
                Some(libc::EIO) => Some((ErrorKind::Io, Some(libc::EIO))),
                Some(libc::ENOSPC) => Some((ErrorKind::NoSpace, Some(libc::ENOSPC))),
                _ => None,
            },
        };
        self.failure = self.failure.or(failure);
        progress.finish(piece, result);
    }

    /// A failed read is tried three times more before it is an answer; a failed write is one at
    /// once.
    fn is_read_again(&mut self, piece: &Piece) -> bool {
        let failed_count = self.failed_reads.entry(piece.start + piece.len).or_default();
        *failed_count += 1;
        self.direction == Direction::Read && *failed_count <= 3
    }

    fn check_outcome(&self, progress: &mut Progress) -> bool {
        let outcome = progress.outcome();
        assert!(outcome.is_none() || self.flying.is_empty(), "an answer with pieces in flight");
        let Some(answer) = outcome else { return false };
        match answer {
            Ok(()) => {
                assert!(self.failure.is_none(), "a failure was swallowed");
                assert!(self.moved.iter().all(|&count| count == 1), "not each block once");
            }
            Err(error) => assert_eq!(Some((error.kind(), error.errno())), self.failure),
        }
        true
    }
}

fuzz_target!(|data: &[u8]| {
    let [shape, blocks, more_blocks, pieces, steps @ ..] = data else { return };
    let alignment = [512, 4096][*shape as usize & 1];
    let direction = [Direction::Read, Direction::Write][*shape as usize >> 1 & 1];
    let block_count = 1 + (*blocks as usize | (*more_blocks as usize & 1) << 8);
    let piece_len = alignment * (1 + *pieces as usize % 32);
    let mut progress =
        Progress::new(direction, 1 << 40, block_count * alignment, piece_len, alignment);
    let (moved, flying) = (vec![0; block_count], Vec::new());
    let failed_reads = HashMap::new();
    let mut model =
        Model { direction, alignment, piece_len, moved, flying, failed_reads, failure: None };
    for step in steps.chunks_exact(4) {
        let [which, how, low, high] = step else { return };
        model.take_pieces(&mut progress, *which as usize >> 4);
        if *how == 255 && progress.has_next() {
            progress.abandon();
            model.failure = model.failure.or(Some((ErrorKind::Cancelled, None)));
        } else {
            model.answer(&mut progress, *which, *how, u16::from_le_bytes([*low, *high]));
        }
        if model.check_outcome(&mut progress) {
            return;
        }
    }
    // From here on the kernel moves everything: a request comes to its end.
    while !model.check_outcome(&mut progress) {
        model.take_pieces(&mut progress, usize::MAX);
        model.answer(&mut progress, 0, 15, 0);
    }
});
