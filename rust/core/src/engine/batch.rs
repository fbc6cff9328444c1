//! Requests that lie side by side in the file travel as one.
//!
//! ```text
//! tensors   [ 64 KiB ][ 64 KiB ][ 64 KiB ]      each with memory of its own
//! file       |------------------------|         one piece, one system call, one vector of buffers
//! ```
//!
//! A disk needs large requests to be fast, and small tensors do not make any. The allocator hands
//! out neighbouring extents to tensors that are written one after the other, so the worker joins
//! what waits in the queue; it never waits for more to come.

use crate::direction::Direction;
use crate::engine::contract::Setup;
use crate::engine::progress::{Piece, Progress};
use crate::error::{ErrorKind, Result};
use crate::queue::{Job, Request};

/// More buffers than this would not make a request faster, and the kernel takes 1024 at most.
const MEMBERS_MAX: usize = 256;

/// One or more neighbouring requests on their way, claimed from the queue.
pub struct Batch {
    direction: Direction,
    members: Vec<Member>,
    /// Where the first member lies in the file.
    offset: u64,
    len: usize,
    progress: Progress,
}

struct Member {
    request: Request,
    job: Job,
    /// Where its bytes begin in the batch.
    start: usize,
}

/// A run of memory that one entry of a vectored call covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub address: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

/// The part of a piece that lies in one member.
pub struct Part<'a> {
    /// The member's job.
    pub job: &'a Job,
    /// First byte, counted from the start of the job's buffer.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Batch {
    /// Takes what waits first in `direction`, with its neighbours up to the size of a piece.
    ///
    /// `held` is the request that was taken last and did not fit; it comes first next time.
    pub fn take(setup: &Setup, held: &mut Option<Request>, direction: Direction) -> Option<Self> {
        let mut next = || held.take().or_else(|| setup.queue.pop(direction));
        let (request, job) = loop {
            let request = next()?;
            if let Some(job) = begin(setup, &request) {
                break (request, job);
            }
        };
        let mut range = request.place();
        let mut members = vec![Member { request, job, start: 0 }];
        while members.len() < MEMBERS_MAX && range.end - range.start < setup.piece_len as u64 {
            let Some(request) = setup.queue.pop(direction) else { break };
            let place = request.place();
            // Backward asks for its tensors in the reverse order of their writes.
            let (is_after, is_before) = (place.start == range.end, place.end == range.start);
            let joined = range.start.min(place.start)..range.end.max(place.end);
            if !(is_after || is_before) || joined.end - joined.start > setup.piece_len as u64 {
                *held = Some(request);
                break;
            }
            // One that was cancelled leaves a gap, and so does one without room on the disk.
            let Some(job) = begin(setup, &request) else { break };
            let index = if is_after { members.len() } else { 0 };
            members.insert(index, Member { request, job, start: 0 });
            range = joined;
        }
        Some(Self::new(setup, direction, members))
    }

    fn new(setup: &Setup, direction: Direction, mut members: Vec<Member>) -> Self {
        let (offset, mut len) = (members[0].job.extent.offset(), 0);
        for member in &mut members {
            member.start = len;
            len += member.job.buffer.len();
        }
        let progress = Progress::new(direction, offset, len, setup.piece_len, setup.alignment);
        Self { direction, members, offset, len, progress }
    }

    /// Which way.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Where in the file a piece begins.
    pub fn offset(&self, piece: &Piece) -> u64 {
        self.offset + piece.start as u64
    }

    /// The descriptor of the file.
    pub fn fd(&self) -> std::os::fd::RawFd {
        self.members[0].job.extent.file().fd()
    }

    /// The progress, for the engine; a batch that everybody gave up sends no more pieces.
    pub fn progress(&mut self) -> &mut Progress {
        if self.members.iter().all(|member| member.request.is_abandoned()) {
            self.progress.abandon();
        }
        &mut self.progress
    }

    /// The parts of a piece, member by member.
    pub fn parts(&self, piece: &Piece) -> impl Iterator<Item = Part<'_>> {
        let (start, end) = (piece.start, piece.start + piece.len);
        debug_assert!(end <= self.len);
        let first = self.members.partition_point(|member| member.start <= start) - 1;
        let inside = self.members[first..].iter().take_while(move |member| member.start < end);
        inside.map(move |member| {
            let from = start.max(member.start);
            let to = end.min(member.start + member.job.buffer.len());
            Part { job: &member.job, start: from - member.start, len: to - from }
        })
    }

    /// The memory of a piece; neighbours in memory are one span.
    pub fn spans(&self, piece: &Piece) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for part in self.parts(piece) {
            let address = part.job.buffer.piece(part.start, part.len);
            match spans.last_mut() {
                Some(last) if last.address.wrapping_add(last.len) == address => {
                    last.len += part.len;
                }
                _ => spans.push(Span { address, len: part.len }),
            }
        }
        spans
    }

    /// Answers every member; returns those that shall be tried alone, each a batch of its own.
    ///
    /// One bad block must not fail its neighbours.
    pub fn finish(self, setup: &Setup, answer: &Result<()>) -> Vec<Self> {
        let is_fault = answer.as_ref().is_err_and(|error| {
            !matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Closed | ErrorKind::Poisoned)
        });
        if is_fault && self.members.len() > 1 {
            let alone = |member| Self::new(setup, self.direction, vec![member]);
            return self.members.into_iter().map(alone).collect();
        }
        for Member { job, .. } in self.members {
            setup.meter.end(self.direction, job.buffer.len() as u64, answer);
            job.finish(answer.clone());
        }
        Vec::new()
    }

    /// The jobs, for an engine that cannot go on.
    pub fn into_jobs(self) -> impl Iterator<Item = Job> {
        self.members.into_iter().map(|member| member.job)
    }
}

/// Claims a request and readies it; `None` if it was cancelled, or has failed already.
fn begin(setup: &Setup, request: &Request) -> Option<Job> {
    let job = request.claim()?;
    setup.meter.begin(job.direction);
    match job.prepare() {
        Ok(()) => Some(job),
        Err(error) => {
            let answer = Err(error);
            setup.meter.end(job.direction, job.buffer.len() as u64, &answer);
            job.finish(answer);
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Batch, Span};
    use crate::config::DirectIo;
    use crate::direction::Direction;
    use crate::disk::spill_file::{Extent, Quota, SpillFile};
    use crate::disk::statistics::Meter;
    use crate::engine::contract::Setup;
    use crate::error::{Error, ErrorKind};
    use crate::memory::arena::Arena;
    use crate::memory::buffer::IoBuf;
    use crate::queue::{Job, Request, SubmitQueue};
    use crate::ticket::{Ticket, ticket};
    use std::sync::Arc;

    const BLOCK: usize = 4096;

    struct Rig {
        setup: Setup,
        file: Arc<SpillFile>,
        arena: Arc<Arena>,
        _dir: tempfile::TempDir,
    }

    impl Rig {
        fn new(piece_len: usize) -> Self {
            let dir = tempfile::tempdir_in(".").unwrap();
            let quota = Quota::new(None);
            let (file, _) = SpillFile::open(dir.path(), DirectIo::Optional, &quota).unwrap();
            let setup = Setup {
                queue: SubmitQueue::new(64).unwrap(),
                meter: Arc::new(Meter::default()),
                alignment: 512,
                depth: 4,
                piece_len,
            };
            Self { setup, file, arena: Arena::new(1 << 20).unwrap(), _dir: dir }
        }

        fn extents(&self, count: usize) -> Vec<Arc<Extent>> {
            (0..count).map(|_| Arc::new(self.file.reserve(BLOCK as u64).unwrap())).collect()
        }

        fn push(&self, extent: &Arc<Extent>) -> (Request, Ticket) {
            let (completer, ticket) = ticket();
            let buffer = IoBuf::from(Arc::new(self.arena.slot(BLOCK).unwrap()));
            let extent = Arc::clone(extent);
            let direction = Direction::Read;
            let request = Request::new(Job { direction, extent, buffer, completer, backlog: None });
            self.setup.queue.push(&request).unwrap();
            (request, ticket)
        }
    }

    #[test]
    fn neighbours_travel_together_in_both_orders() {
        for is_reverse in [false, true] {
            let rig = Rig::new(1 << 20);
            let mut extents = rig.extents(8);
            if is_reverse {
                extents.reverse();
            }
            let pushed: Vec<_> = extents.iter().map(|extent| rig.push(extent)).collect();
            let mut held = None;
            let mut batch = Batch::take(&rig.setup, &mut held, Direction::Read).unwrap();
            assert!(held.is_none() && rig.setup.queue.is_empty());
            let piece = batch.progress().next_piece().unwrap();
            assert_eq!((piece.start, piece.len), (0, 8 * BLOCK));
            assert_eq!(batch.offset(&piece), extents[0].offset().min(extents[7].offset()));
            let covered: usize = batch.spans(&piece).iter().map(|span| span.len).sum();
            assert_eq!(covered, 8 * BLOCK);
            let places: Vec<_> = batch.parts(&piece).map(|part| part.job.extent.offset()).collect();
            assert!(places.is_sorted(), "the file is read from front to back");
            assert!(batch.finish(&rig.setup, &Ok(())).is_empty());
            assert!(pushed.iter().all(|(_, ticket)| ticket.answer().unwrap().is_ok()));
        }
    }

    #[test]
    fn a_gap_or_a_full_piece_ends_a_batch_and_nothing_is_lost() {
        let rig = Rig::new(3 * BLOCK);
        let extents = rig.extents(7);
        // 0 1 2 are a full piece, 4 has a gap before it, 6 another.
        let tickets: Vec<_> =
            [0, 1, 2, 4, 6].iter().map(|&index| rig.push(&extents[index]).1).collect();
        let (mut held, mut sizes) = (None, Vec::new());
        while let Some(mut batch) = Batch::take(&rig.setup, &mut held, Direction::Read) {
            sizes.push(batch.progress().next_piece().unwrap().len / BLOCK);
            batch.finish(&rig.setup, &Ok(()));
        }
        assert_eq!(sizes, [3, 1, 1]);
        assert!(tickets.iter().all(|ticket| ticket.answer().unwrap().is_ok()));
    }

    #[test]
    fn a_cancelled_member_is_left_out() {
        let rig = Rig::new(1 << 20);
        let pushed: Vec<_> = rig.extents(3).iter().map(|extent| rig.push(extent)).collect();
        assert!(pushed[1].0.cancel());
        let (mut held, mut count) = (None, 0);
        while let Some(batch) = Batch::take(&rig.setup, &mut held, Direction::Read) {
            count += 1;
            batch.finish(&rig.setup, &Ok(()));
        }
        assert_eq!(count, 2);
        assert!(pushed[0].1.answer().unwrap().is_ok() && pushed[2].1.answer().unwrap().is_ok());
    }

    #[test]
    fn a_fault_is_tried_again_member_by_member() {
        let rig = Rig::new(1 << 20);
        let pushed: Vec<_> = rig.extents(3).iter().map(|extent| rig.push(extent)).collect();
        let batch = Batch::take(&rig.setup, &mut None, Direction::Read).unwrap();
        let fault = Err(Error::new(ErrorKind::Io, "a bad block"));
        let alone = batch.finish(&rig.setup, &fault);
        assert_eq!(alone.len(), 3);
        assert!(pushed.iter().all(|(_, ticket)| !ticket.is_done()));
        for (index, batch) in alone.into_iter().enumerate() {
            let answer = if index == 1 { fault.clone() } else { Ok(()) };
            assert!(batch.finish(&rig.setup, &answer).is_empty());
        }
        let outcomes: Vec<_> =
            pushed.iter().map(|(_, ticket)| ticket.answer().unwrap().is_ok()).collect();
        assert_eq!(outcomes, [true, false, true]);
    }

    #[test]
    fn neighbours_in_memory_are_one_span() {
        let rig = Rig::new(1 << 20);
        let extents = rig.extents(4);
        let _pushed: Vec<_> = extents.iter().map(|extent| rig.push(extent)).collect();
        let mut batch = Batch::take(&rig.setup, &mut None, Direction::Read).unwrap();
        let piece = batch.progress().next_piece().unwrap();
        let spans = batch.spans(&piece);
        // A fresh arena hands its slots out side by side.
        assert_eq!(spans, [Span { address: spans[0].address, len: 4 * BLOCK }]);
        batch.finish(&rig.setup, &Ok(()));
    }
}
