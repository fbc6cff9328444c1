//! A batch joins requests that lie side by side in the file.
//!
//! ```text
//! tensors   [ 64 KiB ][ 64 KiB ][ 64 KiB ]      each with memory of its own
//! file       |------------------------|         one piece, one system call, one vector of buffers
//! ```
//!
//! A disk needs large requests to be fast, and small tensors make none. The allocator hands out
//! neighbouring extents to tensors that are written one after the other. The worker joins requests
//! that wait in the queue; it never waits for more to come.

use std::io;

use crate::direction::Direction;
use crate::engine::contract::Setup;
use crate::engine::progress::{Piece, Progress};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::landing::Span;
use crate::queue::{Job, JobMemory, Request};

/// A vectored call takes 1024 runs of memory, and a member has at most three. With 256 members of
/// 16 KiB a batch fills the usual piece of 4 MiB.
const MEMBERS_MAX: usize = 256;

/// A request on its way, or several neighbouring requests, claimed from the queue.
pub struct Batch {
    direction: Direction,
    members: Vec<Member>,
    /// Offset of the first member in the file.
    offset: u64,
    len: usize,
    piece_len: usize,
    progress: Progress,
}

struct Member {
    request: Request,
    job: Job,
    /// Offset of its bytes in the batch.
    start: usize,
    /// The error of a checksum that did not match.
    corruption: Option<Error>,
}

/// The memory of a piece, by direction. Neighbours in memory form one span.
#[derive(Debug, PartialEq, Eq)]
pub enum Spans {
    /// The kernel reads from here: a write.
    From(Vec<Span<*const u8>>),
    /// The kernel writes into here: a read.
    Into(Vec<Span<*mut u8>>),
}

/// The part of a piece that lies in one member.
pub struct Part<'a> {
    /// The member's job.
    pub job: &'a Job,
    /// First byte, counted from the start of the job's memory.
    pub start: usize,
    /// Length in bytes.
    pub len: usize,
}

impl Batch {
    /// Takes the first waiting request in `direction`, with its neighbours up to the size of a
    /// piece.
    ///
    /// `held` is the request that was taken last and did not fit. It begins the next batch.
    pub fn take(setup: &Setup, held: &mut Option<Request>, direction: Direction) -> Option<Self> {
        let mut next = || held.take().or_else(|| setup.queue.pop(direction));
        let (request, job) = loop {
            let request = next()?;
            if let Some(job) = begin(setup, &request) {
                break (request, job);
            }
        };
        let mut range = request.file_range();
        let mut members = vec![Member { request, job, start: 0, corruption: None }];
        while members.len() < MEMBERS_MAX && range.end - range.start < setup.piece_len as u64 {
            let Some(request) = setup.queue.pop(direction) else { break };
            let other = request.file_range();
            // Backward asks for its tensors in the reverse order of their writes.
            let (is_after, is_before) = (other.start == range.end, other.end == range.start);
            let joined = range.start.min(other.start)..range.end.max(other.end);
            if !(is_after || is_before) || joined.end - joined.start > setup.piece_len as u64 {
                *held = Some(request);
                break;
            }
            // A request that was cancelled, or has no room on the disk, leaves a gap.
            let Some(job) = begin(setup, &request) else { break };
            let index = if is_after { members.len() } else { 0 };
            members.insert(index, Member { request, job, start: 0, corruption: None });
            range = joined;
        }
        Some(Self::new(setup, direction, members))
    }

    fn new(setup: &Setup, direction: Direction, mut members: Vec<Member>) -> Self {
        let (offset, mut len) = (members[0].job.extent.offset(), 0);
        for member in &mut members {
            member.start = len;
            len += member.job.memory.len();
        }
        let piece_len = setup.piece_len;
        let progress = Progress::new(direction, offset, len, piece_len, setup.alignment);
        Self { direction, members, offset, len, piece_len, progress }
    }

    /// The direction of the bytes.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns true if its bytes are compared with checksums after they were read.
    pub fn is_compared(&self) -> bool {
        self.direction == Direction::Read && self.members[0].job.extent.checksums().is_some()
    }

    /// Offset of a piece in the file.
    pub fn offset(&self, piece: &Piece) -> u64 {
        self.offset + piece.start as u64
    }

    /// The descriptor of the file.
    pub fn fd(&self) -> std::os::fd::RawFd {
        self.members[0].job.extent.file().fd()
    }

    /// The next piece to send; `None` if there is none now, or if all members were cancelled.
    pub fn next_piece(&mut self) -> Option<Piece> {
        self.look_for_cancels();
        self.progress.next_piece()
    }

    /// Returns true if [`Batch::next_piece`] would return a piece.
    pub fn has_next(&mut self) -> bool {
        self.look_for_cancels();
        self.progress.has_next()
    }

    /// Takes the kernel's result for a piece: bytes moved, or an error. A block that has been read
    /// to its end is compared with its checksum and delivered.
    pub fn finish_piece(&mut self, piece: Piece, moved: io::Result<usize>) {
        let is_whole = moved.as_ref().is_ok_and(|&moved| moved == piece.len);
        self.progress.finish(piece, moved);
        if self.direction == Direction::Write || !is_whole {
            return;
        }
        // After short reads the piece is the rest of its block; the bytes before it were read
        // earlier.
        let start = piece.start / self.piece_len * self.piece_len;
        let (block, first) = (start..piece.start + piece.len, self.member_at(start));
        for member in &mut self.members[first..] {
            let Some((start, len)) = member.overlap(&block) else { break };
            match member.job.check(start, len) {
                Ok(()) => member.job.deliver(start, len),
                Err(error) => drop(member.corruption.get_or_insert(error)),
            }
        }
    }

    /// The outcome, once nothing is in flight and nothing is left to send.
    pub fn outcome(&mut self) -> Option<Result<()>> {
        self.progress.outcome()
    }

    fn look_for_cancels(&mut self) {
        if self.members.iter().all(|member| member.request.is_cancel_asked()) {
            self.progress.abandon();
        }
    }

    /// The index of the member that holds a byte of the batch.
    fn member_at(&self, start: usize) -> usize {
        self.members.partition_point(|member| member.start <= start) - 1
    }

    /// The parts of a piece, member by member.
    pub fn parts(&self, piece: &Piece) -> impl Iterator<Item = Part<'_>> {
        let range = piece.start..piece.start + piece.len;
        debug_assert!(range.end <= self.len);
        self.members[self.member_at(piece.start)..].iter().map_while(move |member| {
            let (start, len) = member.overlap(&range)?;
            Some(Part { job: &member.job, start, len })
        })
    }

    /// The memory of a piece.
    pub fn spans(&self, piece: &Piece) -> Spans {
        match self.direction {
            Direction::Write => {
                let mut spans = Vec::new();
                for part in self.parts(piece) {
                    if let JobMemory::From(source) = &part.job.memory {
                        let address = source.address(part.start, part.len);
                        push(&mut spans, Span { address, len: part.len }, |last| {
                            last.address.wrapping_add(last.len)
                        });
                    }
                }
                Spans::From(spans)
            }
            Direction::Read => {
                let mut spans = Vec::new();
                for part in self.parts(piece) {
                    if let JobMemory::Into(landing) = &part.job.memory {
                        for span in landing.spans(part.start, part.len) {
                            push(&mut spans, span, |last| last.address.wrapping_add(last.len));
                        }
                    }
                }
                Spans::Into(spans)
            }
        }
    }

    /// Answers every member. After a fault it returns the members as batches of their own, to be
    /// tried alone.
    ///
    /// One bad block must not fail its neighbours.
    pub fn finish(self, setup: &Setup, answer: &Result<()>) -> Vec<Self> {
        let is_fault = answer.as_ref().is_err_and(|error| {
            !matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Closed | ErrorKind::Poisoned)
        });
        if is_fault && self.members.len() > 1 {
            let alone = |member| {
                Self::new(setup, self.direction, vec![Member { corruption: None, ..member }])
            };
            return self.members.into_iter().map(alone).collect();
        }
        for Member { job, corruption, .. } in self.members {
            let answer = answer.clone().and(corruption.map_or(Ok(()), Err));
            setup.end(job, answer);
        }
        Vec::new()
    }

    /// The jobs, for an engine that must stop.
    pub fn into_jobs(self) -> impl Iterator<Item = Job> {
        self.members.into_iter().map(|member| member.job)
    }
}

impl Member {
    /// The part of a range of the batch that lies in the member's memory, as start and length.
    fn overlap(&self, range: &std::ops::Range<usize>) -> Option<(usize, usize)> {
        let start = range.start.max(self.start);
        let end = range.end.min(self.start + self.job.memory.len());
        (start < end).then(|| (start - self.start, end - start))
    }
}

/// Adds a span, or extends the last span if the new span begins at its end.
fn push<Address: PartialEq>(
    spans: &mut Vec<Span<Address>>,
    span: Span<Address>,
    end: impl Fn(&Span<Address>) -> Address,
) {
    match spans.last_mut() {
        Some(last) if end(last) == span.address => last.len += span.len,
        _ => spans.push(span),
    }
}

/// Claims and prepares a request; `None` if it was cancelled or could not be prepared.
fn begin(setup: &Setup, request: &Request) -> Option<Job> {
    let job = request.claim()?;
    setup.statistics.begin(job.direction());
    match job.prepare() {
        Ok(()) => Some(job),
        Err(error) => {
            setup.end(job, Err(error));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Batch, Spans};
    use crate::config::DirectIo;
    use crate::direction::Direction;
    use crate::disk::health::Health;
    use crate::disk::spill_file::{Extent, Quota, SpillFile};
    use crate::engine::contract::Setup;
    use crate::engine::progress::Piece;
    use crate::error::{Error, ErrorKind};
    use crate::memory::arena::Arena;
    use crate::memory::landing::{Landing, Span};
    use crate::queue::{Job, JobMemory, Request, SubmitQueue};
    use crate::ticket::{Ticket, ticket};
    use std::sync::Arc;
    use std::time::Duration;

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
                statistics: Arc::default(),
                health: Arc::new(Health::default()),
                alignment: 512,
                depth: 4,
                piece_len,
                write_patience: Duration::ZERO,
            };
            Self { setup, file, arena: Arena::new(1 << 20).unwrap(), _dir: dir }
        }

        fn extents(&self, count: usize) -> Vec<Arc<Extent>> {
            (0..count).map(|_| Arc::new(self.file.reserve(BLOCK as u64).unwrap())).collect()
        }

        fn push(&self, extent: &Arc<Extent>) -> (Request, Ticket) {
            let (completer, ticket) = ticket();
            let landing = Landing::from(Arc::new(self.arena.slot(BLOCK).unwrap()));
            let (extent, memory) = (Arc::clone(extent), JobMemory::Into(landing));
            let request = Request::new(Job::new(extent, memory, completer));
            self.setup.queue.push(&request).unwrap();
            (request, ticket)
        }
    }

    fn spans(batch: &Batch, piece: &Piece) -> Vec<Span<*mut u8>> {
        let Spans::Into(spans) = batch.spans(piece) else { panic!("a read needs targets") };
        spans
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
            let piece = batch.next_piece().unwrap();
            assert_eq!((piece.start, piece.len), (0, 8 * BLOCK));
            assert_eq!(batch.offset(&piece), extents[0].offset().min(extents[7].offset()));
            let covered: usize = spans(&batch, &piece).iter().map(|span| span.len).sum();
            assert_eq!(covered, 8 * BLOCK);
            let offsets: Vec<_> =
                batch.parts(&piece).map(|part| part.job.extent.offset()).collect();
            assert!(offsets.is_sorted(), "the file is read from front to back");
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
            sizes.push(batch.next_piece().unwrap().len / BLOCK);
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
        let piece = batch.next_piece().unwrap();
        let spans = spans(&batch, &piece);
        // A fresh arena hands its slots out side by side.
        assert_eq!(spans, [Span { address: spans[0].address, len: 4 * BLOCK }]);
        batch.finish(&rig.setup, &Ok(()));
    }
}
