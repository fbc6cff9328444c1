//! One thread owns one `io_uring`: it takes requests, keeps pieces in flight, checks every result.
//!
//! The worker sleeps in the ring with the queue's eventfd armed, so idle costs nothing. **The ring
//! dies first**: buffers and extents of pieces in flight belong to the worker, which leaves its
//! loop only when no piece is in flight. If the ring itself fails, they are leaked on purpose,
//! because the kernel may still write into them.
#![expect(unsafe_code, reason = "pushes buffer addresses into the submission ring")]

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use io_uring::{IoUring, opcode, types};

use crate::direction::Direction;
use crate::engine::batch::{Batch, Spans};
use crate::engine::contract::{IoEngine, Setup};
use crate::engine::progress::Piece;
use crate::engine::write_depth::WriteDepth;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::landing::Span;
use crate::queue::{Job, Request};

/// Marks the completion of the eventfd's poll.
const WAKE: u64 = u64::MAX;

/// The engine's handle: a thread and the way to end it.
pub struct Uring {
    setup: Setup,
    thread: Option<JoinHandle<()>>,
}

impl Uring {
    /// Starts the worker; an error if the kernel refuses a ring.
    pub fn start(setup: Setup) -> Result<Self> {
        let (report, started) = mpsc::channel();
        let for_worker = setup.clone();
        let spawned = std::thread::Builder::new().name("ssdtrain-uring".into()).spawn(move || {
            // The ring is built in the thread that uses it: SINGLE_ISSUER binds it to this thread.
            match build_ring(for_worker.depth) {
                Ok(ring) => {
                    let worker = Worker::new(for_worker, ring);
                    if report.send(Ok(())).is_ok() {
                        worker.run();
                    }
                }
                // The starting thread waits for this report below, so it still exists.
                Err(error) => drop(report.send(Err(error))),
            }
        });
        let thread = spawned.map_err(|source| {
            Error::from_io("cannot start an I/O thread; see `ulimit -u`", &source)
        })?;
        let dead = |_| Error::new(ErrorKind::Poisoned, "the I/O thread died while it started");
        started.recv().map_err(dead)??;
        Ok(Self { setup, thread: Some(thread) })
    }
}

impl IoEngine for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn close(&mut self) {
        self.setup.queue.close(1);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            self.setup.queue.poison();
        }
        self.setup.queue.cancel_all();
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.close();
    }
}

fn build_ring(depth: u32) -> Result<IoUring> {
    // An entry for each piece, and one for the poll of the eventfd.
    let entries = depth + 1;
    let modern = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    // Kernels before 6.1 refuse the flags; the plain ring does the same work.
    let ring = modern.or_else(|_| IoUring::new(entries));
    ring.and_then(try_ring).map_err(|source| {
        let next = match source.raw_os_error() {
            Some(libc::EPERM) => " (forbidden by seccomp or sysctl kernel.io_uring_disabled)",
            Some(libc::ENOSYS) => " (this kernel has none)",
            Some(libc::ENOMEM) => " (raise `ulimit -l`)",
            Some(libc::EMFILE) => " (raise `ulimit -n`)",
            _ => "",
        };
        let message = format!("cannot create an io_uring{next}");
        Error::from_io(message, &source).with_kind(ErrorKind::Unsupported)
    })
}

/// Sends an empty request, because a filter may allow a ring to be made but not to be entered.
fn try_ring(mut ring: IoUring) -> io::Result<IoUring> {
    // SAFETY: the request has no buffer and no file.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(io::Error::other)?;
    while let Err(source) = ring.submit_and_wait(1) {
        if source.raw_os_error() != Some(libc::EINTR) {
            return Err(source);
        }
    }
    let answer = ring.completion().next().map(|completion| completion.result());
    match answer {
        Some(0) => Ok(ring),
        other => Err(io::Error::other(format!("a first request was answered with {other:?}"))),
    }
}

/// A piece in flight.
struct Flight {
    /// The number of its batch.
    number: usize,
    piece: Piece,
    sent_at: Instant,
    /// The buffers of a vectored call; the kernel reads them when the entry is submitted.
    vector: Vec<libc::iovec>,
}

struct Worker {
    ring: IoUring,
    setup: Setup,
    /// Batches that began, by number; a number is reused when its batch has ended.
    active: Vec<Option<Batch>>,
    vacant: Vec<usize>,
    /// Batches with pieces to send, in order of arrival; reads are served first.
    sending: [VecDeque<usize>; 2],
    /// Requests that were taken from the queue and begin the next batch of their direction.
    held: [Option<Request>; 2],
    /// Pieces in flight, by the number the kernel hands back.
    flights: Vec<Option<Flight>>,
    vacant_flights: Vec<usize>,
    in_flight: usize,
    writes: WriteDepth,
    wake_armed: bool,
}

impl Worker {
    fn new(setup: Setup, ring: IoUring) -> Self {
        let depth = setup.depth as usize;
        Self {
            ring,
            writes: WriteDepth::new(depth, setup.write_patience),
            setup,
            active: Vec::new(),
            vacant: Vec::new(),
            sending: [VecDeque::new(), VecDeque::new()],
            held: [None, None],
            flights: (0..depth).map(|_| None).collect(),
            vacant_flights: (0..depth).collect(),
            in_flight: 0,
            wake_armed: false,
        }
    }

    fn run(mut self) {
        if let Err(error) = self.serve() {
            self.fail_all(&error);
        }
    }

    fn serve(&mut self) -> Result<()> {
        loop {
            self.send_pieces()?;
            let closed = self.setup.queue.is_closed();
            if closed && self.in_flight == 0 {
                self.end_unsent();
                return Ok(());
            }
            let full = self.vacant_flights.is_empty();
            // If writes may not be sent yet, one is in flight, and its completion wakes the worker.
            let announced = !full && !closed && self.setup.queue.may_sleep(self.writes.may_send());
            if full || closed || announced {
                self.arm_wake()?;
                self.wait(1)?;
            } else {
                self.wait(0)?;
            }
            if announced {
                self.setup.queue.woke();
            }
            self.reap()?;
        }
    }

    /// Fills the ring: batches that have begun, then new requests; reads before writes.
    fn send_pieces(&mut self) -> Result<()> {
        for direction in [Direction::Read, Direction::Write] {
            while !self.vacant_flights.is_empty() && self.may_send(direction) {
                let Some(number) = self.front(direction) else { break };
                let batch = self.active[number].as_mut().expect("a batch that sends is active");
                if let Some(piece) = batch.next_piece() {
                    self.push_piece(number, piece)?;
                } else {
                    self.sending[index(direction)].pop_front();
                    self.end_if_done(number);
                }
            }
        }
        Ok(())
    }

    fn may_send(&self, direction: Direction) -> bool {
        direction == Direction::Read || self.writes.may_send()
    }

    /// The batch that sends the next piece. If none has begun, it takes a new one.
    fn front(&mut self, direction: Direction) -> Option<usize> {
        if let Some(&number) = self.sending[index(direction)].front() {
            return Some(number);
        }
        if self.setup.queue.is_closed() {
            return None;
        }
        let batch = Batch::take(&self.setup, &mut self.held[index(direction)], direction)?;
        Some(self.begin(batch))
    }

    fn begin(&mut self, batch: Batch) -> usize {
        let direction = batch.direction();
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.active.push(None);
            self.active.len() - 1
        });
        self.active[number] = Some(batch);
        self.sending[index(direction)].push_back(number);
        number
    }

    fn push_piece(&mut self, number: usize, piece: Piece) -> Result<()> {
        let slot = self.vacant_flights.pop().expect("the caller saw a vacant flight");
        self.in_flight += 1;
        let batch = self.active[number].as_ref().expect("a batch that sends is active");
        self.setup.statistics.operation(batch.direction());
        if batch.direction() == Direction::Write {
            self.writes.sent();
        }
        let (fd, offset) = (types::Fd(batch.fd()), batch.offset(&piece));
        let mut vector = Vec::new();
        let entry = match batch.spans(&piece) {
            Spans::Into(spans) => {
                if let [Span { address, len }] = spans[..] {
                    opcode::Read::new(fd, address, len as u32).offset(offset).build()
                } else {
                    vector.extend(spans.iter().map(|span| iovec(span.address, span.len)));
                    let (start, count) = (vector.as_ptr(), vector.len() as u32);
                    opcode::Readv::new(fd, start, count).offset(offset).build()
                }
            }
            Spans::From(spans) => {
                if let [Span { address, len }] = spans[..] {
                    opcode::Write::new(fd, address, len as u32).offset(offset).build()
                } else {
                    let iovecs = spans.iter().map(|span| iovec(span.address.cast_mut(), span.len));
                    vector.extend(iovecs);
                    let (start, count) = (vector.as_ptr(), vector.len() as u32);
                    opcode::Writev::new(fd, start, count).offset(offset).build()
                }
            }
        };
        // Moving the vector leaves its elements where they are.
        let sent_at = Instant::now();
        self.flights[slot] = Some(Flight { number, piece, sent_at, vector });
        self.push(&entry.user_data(slot as u64))
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) -> Result<()> {
        loop {
            // SAFETY: the entry's buffer, file and extent are held by `active` until its completion
            // was reaped, and `Worker` never drops an active request before that (see `fail_all`).
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() {
                return Ok(());
            }
            self.wait(0)?;
        }
    }

    /// Lets a push to the queue wake the ring.
    fn arm_wake(&mut self) -> Result<()> {
        if self.wake_armed {
            return Ok(());
        }
        let fd = types::Fd(self.setup.queue.waker().fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
        self.push(&entry)?;
        self.wake_armed = true;
        Ok(())
    }

    fn wait(&mut self, completions: usize) -> Result<()> {
        match self.ring.submit_and_wait(completions) {
            Ok(_) => Ok(()),
            Err(source) => match source.raw_os_error() {
                // Interrupted, or completions must be reaped first: the loop does that.
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(Error::from_io("io_uring_enter failed", &source)),
            },
        }
    }

    /// Takes the completions that are there, up to the first that is compared with a checksum.
    fn reap(&mut self) -> Result<()> {
        loop {
            let Some(completion) = self.ring.completion().next() else { return Ok(()) };
            let result = completion.result();
            if completion.user_data() == WAKE {
                self.wake_armed = false;
                // If the poll failed, the bell was not rung, and `consume` would wait for a ring.
                if result >= 0 {
                    self.setup.queue.waker().consume()?;
                }
                continue;
            }
            let slot = completion.user_data() as usize;
            let Flight { number, piece, sent_at, vector } =
                self.flights[slot].take().expect("the kernel completes what was submitted, once");
            drop(vector);
            self.vacant_flights.push(slot);
            self.in_flight -= 1;
            let moved = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            let batch = self.active[number].as_mut().expect("a piece in flight has its batch");
            let direction = batch.direction();
            if direction == Direction::Write {
                self.writes.ended(sent_at, Instant::now());
            }
            batch.finish_piece(piece, moved);
            let (has_next, is_compared) = (batch.has_next(), batch.is_compared());
            let is_sending = self.sending[index(direction)].contains(&number);
            if has_next {
                if !is_sending {
                    self.sending[index(direction)].push_back(number);
                }
            } else if !is_sending {
                self.end_if_done(number);
            }
            if is_compared {
                // The comparison took long, so pieces are sent before the next comparison.
                return Ok(());
            }
        }
    }

    fn end_if_done(&mut self, number: usize) {
        let Some(batch) = self.active[number].as_mut() else { return };
        let Some(answer) = batch.outcome() else { return };
        if let Some(batch) = self.active[number].take() {
            self.vacant.push(number);
            for alone in batch.finish(&self.setup, &answer) {
                self.begin(alone);
            }
        }
    }

    /// At close: answers batches that have pieces left. No piece is in flight.
    fn end_unsent(&mut self) {
        let closed = Err(Error::new(ErrorKind::Closed, "the store was closed"));
        for batch in self.active.iter_mut().filter_map(Option::take) {
            let rest = batch.finish(&self.setup, &closed);
            debug_assert!(rest.is_empty(), "a closed store tries nothing again");
        }
        for request in self.held.iter().flatten() {
            self.setup.queue.refuse(request);
        }
    }

    /// The ring is lost, and the kernel may still use the buffers, so they are leaked.
    fn fail_all(mut self, error: &Error) {
        self.setup.queue.poison();
        for job in self.active_jobs() {
            let message = format!("the I/O worker had to stop: {error}; open a new store");
            job.leak(Err(Error::new(ErrorKind::Poisoned, message)));
        }
    }

    fn active_jobs(&mut self) -> Vec<Job> {
        self.active.drain(..).flatten().flat_map(Batch::into_jobs).collect()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.setup.queue.poison();
            // As in `fail_all`: a panic must not free memory that the kernel may still use.
            for job in self.active_jobs() {
                let message = "the I/O worker died; open a new store";
                job.leak(Err(Error::new(ErrorKind::Poisoned, message)));
            }
        }
    }
}

/// The kernel's entry has one type for both directions; it cannot say that a source is only read.
fn iovec(address: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: address.cast(), iov_len: len }
}

/// The index of a direction in a pair: reads first.
const fn index(direction: Direction) -> usize {
    match direction {
        Direction::Read => 0,
        Direction::Write => 1,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::{Worker, build_ring};
    use crate::config::{DirectIo, Tuning};
    use crate::disk::spill_file::{Extent, Quota, SpillFile};
    use crate::engine::contract::Setup;
    use crate::error::ErrorKind;
    use crate::memory::arena::Arena;
    use crate::memory::host::HostSource;
    use crate::memory::landing::Landing;
    use crate::queue::{Job, JobMemory, Request};
    use crate::ticket::{Ticket, ticket};

    const BLOCK: usize = 4096;
    const LEN: usize = 3 * BLOCK;
    fn setup() -> Setup {
        let tuning = Tuning { queue_depth: 8, piece_bytes: BLOCK };
        Setup { write_patience: Duration::ZERO, ..Setup::new(tuning, BLOCK, 1024).unwrap() }
    }

    fn push(setup: &Setup, extent: &Arc<Extent>, memory: JobMemory) -> Ticket {
        let (completer, ticket) = ticket();
        setup.queue.push(&Request::new(Job::new(Arc::clone(extent), memory, completer))).unwrap();
        ticket
    }

    fn write(setup: &Setup, extent: &Arc<Extent>, arena: &Arc<Arena>) -> Ticket {
        let source = HostSource::from(Arc::new(arena.slot(LEN).unwrap()));
        push(setup, extent, JobMemory::From(source))
    }

    fn read(setup: &Setup, extent: &Arc<Extent>, arena: &Arc<Arena>) -> Ticket {
        let target = Landing::from(Arc::new(arena.slot(LEN).unwrap()));
        push(setup, extent, JobMemory::Into(target))
    }

    #[test]
    fn writes_beyond_the_limit_wait_and_reads_go_past_them() {
        let (dir, arena) = (tempfile::tempdir_in(".").unwrap(), Arena::new(8 << 20).unwrap());
        let (file, _) = SpillFile::open(dir.path(), DirectIo::Optional, &Quota::new(None)).unwrap();
        let setup = setup();
        let ring = match build_ring(setup.depth) {
            Err(error) if error.kind() == ErrorKind::Unsupported => return eprintln!("skipped"),
            ring => ring.unwrap(),
        };
        let mut worker = Worker::new(setup.clone(), ring);
        let start = Instant::now();
        for second in [1, 3] {
            worker.writes.sent();
            let sent_at = start + Duration::from_secs(second);
            worker.writes.ended(sent_at, sent_at + Duration::from_secs(1));
        }
        let extent = Arc::new(file.reserve(LEN as u64).unwrap());
        let _written = write(&setup, &extent, &arena);
        worker.send_pieces().unwrap();
        assert_eq!(worker.in_flight, 2, "of three pieces two are within the limit");
        let _waiting = write(&setup, &extent, &arena);
        assert!(setup.queue.may_sleep(worker.writes.may_send()), "nothing can be done for it");
        let _read = read(&setup, &extent, &arena);
        assert!(!setup.queue.may_sleep(worker.writes.may_send()), "a read can be sent");
        worker.send_pieces().unwrap();
        assert_eq!(worker.in_flight, 5, "all pieces of the read");
        // All get their turn, although each write takes too long; the worker sleeps in between.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..20 {
                    let all = [(); 30].map(|()| {
                        let extent = Arc::new(file.reserve(LEN as u64).unwrap());
                        (write(&setup, &extent, &arena), extent)
                    });
                    for (written, extent) in all {
                        written.wait().unwrap();
                        read(&setup, &extent, &arena).wait().unwrap();
                    }
                }
                setup.queue.close(1);
            });
            worker.serve().unwrap();
        });
    }
}
