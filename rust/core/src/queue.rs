//! The way from any thread to an I/O worker: bounded, lock-free, and quiet when nobody sleeps.
//!
//! Several threads submit requests: the forward thread, backward threads, threads that read ahead.
//! One worker or several take them. Reads and writes have queues of their own, and workers take
//! reads first, because a thread waits for them.

use std::fmt;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};

use crate::direction::Direction;
use crate::disk::spill_file::Extent;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::host::{Checksum, HostSource};
use crate::memory::landing::Landing;
use crate::sync::{ArrayQueue, AtomicBool, AtomicUsize, Bell, Mutex, Ordering, fence};
use crate::ticket::Completer;

/// The bytes of one extent and their memory, for a worker to move.
pub struct Job {
    /// The place on the disk. The job holds it until the kernel is done with it, even after the
    /// tensor is dropped.
    pub extent: Arc<Extent>,
    /// The memory; as long as the extent.
    pub memory: JobMemory,
    completer: Completer,
    backlog: Option<Backlog>,
    on_success: Option<OnSuccess>,
}

/// The memory of a job. Its kind decides the direction of the bytes.
pub enum JobMemory {
    /// Memory that the kernel reads from: a write.
    From(HostSource),
    /// Memory that the kernel writes into: a read.
    Into(Landing),
}

/// An action that the worker runs after a job succeeded, before the ticket is answered.
pub type OnSuccess = Box<dyn FnOnce() + Send>;

/// Counts the bytes of a job into a device's backlog while the job lives.
#[derive(Debug)]
pub struct Backlog(Arc<AtomicU64>, u64);

impl Backlog {
    /// Counts until it is dropped.
    pub fn new(total: &Arc<AtomicU64>, bytes: u64) -> Self {
        total.fetch_add(bytes, Ordering::Relaxed);
        Self(Arc::clone(total), bytes)
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

impl JobMemory {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::From(source) => source.len(),
            Self::Into(landing) => landing.len(),
        }
    }

    /// Returns true if the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if the memory belongs to a GPU.
    pub fn is_on_gpu(&self) -> bool {
        match self {
            Self::From(source) => source.is_on_gpu(),
            Self::Into(landing) => landing.is_on_gpu(),
        }
    }
}

impl Job {
    /// Moves bytes between `extent` and `memory`, and gives the answer to `completer`.
    pub fn new(extent: Arc<Extent>, memory: JobMemory, completer: Completer) -> Self {
        Self { extent, memory, completer, backlog: None, on_success: None }
    }

    /// The same job, counted as long as it lives.
    #[must_use]
    pub fn counted(self, backlog: Backlog) -> Self {
        Self { backlog: Some(backlog), ..self }
    }

    /// The same job, with an action to run after it succeeded.
    #[must_use]
    pub fn then(self, on_success: OnSuccess) -> Self {
        Self { on_success: Some(on_success), ..self }
    }

    /// The direction of the bytes.
    pub fn direction(&self) -> Direction {
        match self.memory {
            JobMemory::From(_) => Direction::Write,
            JobMemory::Into(_) => Direction::Read,
        }
    }

    /// Prepares the extent before the first piece: a write needs blocks on the disk.
    pub fn prepare(&self) -> Result<()> {
        match self.direction() {
            Direction::Read => Ok(()),
            Direction::Write => self.extent.prepare(),
        }
    }

    /// Compares a block that has been read with its checksum, if the store verifies.
    pub fn check(&self, start: usize, len: usize) -> Result<()> {
        let (JobMemory::Into(landing), Some(checksums)) = (&self.memory, self.extent.checksums())
        else {
            return Ok(());
        };
        let (own, mut sum) = (checksums.own_bytes(start, len), Checksum::default());
        landing.hash(own.clone(), &mut sum);
        let (found, expected) = (sum.value(), checksums.get(start));
        if found == expected {
            return Ok(());
        }
        let (offset, dir) = (self.extent.offset() + start as u64, self.extent.file().dir());
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "{} bytes at file offset {offset} in {} came back changed (checksum {found:016x}, \
                 written with {expected:016x}); the disk, or memory written behind autograd's \
                 back, is at fault",
                own.len(),
                dir.display()
            ),
        ))
    }

    /// Copies bytes that have been read to the memory that the caller lent, unless they are there
    /// already.
    pub fn deliver(&self, start: usize, len: usize) {
        if let JobMemory::Into(landing) = &self.memory {
            landing.deliver(start, len);
        }
    }

    /// Ends the job. Memory and extent go first, so that a thread that sees the answer finds them
    /// free.
    pub fn finish(self, answer: Result<()>) {
        let Self { extent, memory, completer, backlog, on_success } = self;
        drop(memory);
        drop(extent);
        drop(backlog);
        match on_success {
            Some(on_success) if answer.is_ok() => on_success(),
            unused => drop(unused),
        }
        completer.complete(answer);
    }

    /// Ends the job but keeps its memory and its extent for ever: the kernel may still use them.
    pub fn leak(self, answer: Result<()>) {
        let Self { extent, memory, completer, .. } = self;
        std::mem::forget(memory);
        std::mem::forget(extent);
        completer.complete(answer);
    }
}

/// A job that is claimed once: by the worker that begins it, or by the thread that cancels it.
#[derive(Clone)]
pub struct Request(Arc<Shared>);

struct Shared {
    direction: Direction,
    /// The bytes of the file that the job moves; readable without claiming the job.
    file_range: Range<u64>,
    job: Mutex<Option<Job>>,
    abandoned: AtomicBool,
}

impl fmt::Debug for Request {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Request")
            .field("direction", &self.0.direction)
            .finish_non_exhaustive()
    }
}

impl Request {
    /// Wraps a job.
    pub fn new(job: Job) -> Self {
        let direction = job.direction();
        let file_range = job.extent.offset()..job.extent.offset() + job.memory.len() as u64;
        let (job, abandoned) = (Mutex::new(Some(job)), AtomicBool::new(false));
        Self(Arc::new(Shared { direction, file_range, job, abandoned }))
    }

    /// The bytes of the file that the job moves.
    pub fn file_range(&self) -> Range<u64> {
        self.0.file_range.clone()
    }

    /// Takes the job, unless it was taken before.
    pub fn claim(&self) -> Option<Job> {
        self.0.job.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Cancels. Returns true if the job had not begun, so that its memory is free now. If it had
    /// begun, its remaining pieces are not sent, and its ticket is answered after the pieces in
    /// flight have ended.
    pub fn cancel(&self) -> bool {
        self.0.abandoned.store(true, Ordering::Relaxed);
        let Some(job) = self.claim() else { return false };
        job.finish(Err(Error::new(ErrorKind::Cancelled, "cancelled before it began")));
        true
    }

    /// Returns true if the request was cancelled, even after its job began.
    pub fn is_cancel_asked(&self) -> bool {
        self.0.abandoned.load(Ordering::Relaxed)
    }
}

/// A bell that is rung only when a worker sleeps.
///
/// A worker announces that it will sleep, looks at the queue once more, and only then sleeps; a
/// producer pushes first and looks for sleepers after. The fences order the two pairs, so at least
/// one of them sees the other and no wake-up is lost.
pub struct Waker {
    bell: Bell,
    sleepers: AtomicUsize,
}

impl Waker {
    fn new() -> Result<Self> {
        Ok(Self { bell: Bell::new()?, sleepers: AtomicUsize::new(0) })
    }

    /// The descriptor that becomes readable, for a worker that waits for several things.
    pub fn fd(&self) -> RawFd {
        self.bell.fd()
    }

    /// Blocks until woken and takes the wake-up.
    pub fn consume(&self) -> Result<()> {
        self.bell.take()
    }

    fn announce_sleep(&self) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    fn withdraw_sleep(&self) {
        // A producer may have taken the announcement already; its wake-up is then one too many,
        // which costs one turn of the worker's loop.
        let _taken = self.take_sleeper();
    }

    fn take_sleeper(&self) -> bool {
        let less_one = |count: usize| count.checked_sub(1);
        self.sleepers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less_one).is_ok()
    }

    fn wake_one(&self) {
        fence(Ordering::SeqCst);
        if self.take_sleeper() {
            self.bell.ring();
        }
    }
}

/// The bounded queue in front of one device.
pub struct SubmitQueue {
    reads: ArrayQueue<Request>,
    writes: ArrayQueue<Request>,
    waker: Waker,
    closed: AtomicBool,
    poisoned: AtomicBool,
}

impl SubmitQueue {
    /// A queue for `capacity` requests per direction.
    pub fn new(capacity: usize) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            reads: ArrayQueue::new(capacity),
            writes: ArrayQueue::new(capacity),
            waker: Waker::new()?,
            closed: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
        }))
    }

    /// Number of requests of one direction that may wait.
    pub fn capacity(&self) -> usize {
        self.writes.capacity()
    }

    /// Queues a request, or says why not; a refused request is dropped unstarted.
    pub fn push(&self, request: &Request) -> Result<()> {
        self.refuse_if_down()?;
        let waiting = self.waiting(request.0.direction);
        if waiting.push(request.clone()).is_err() {
            let count = waiting.len();
            return Err(Error::new(
                ErrorKind::Busy,
                format!("{count} requests are waiting for the disk already; wait for some"),
            ));
        }
        self.waker.wake_one();
        // A close that began between the check and the push may have missed this request. If a
        // worker has taken it already, it ends like any other.
        if let Err(error) = self.refuse_if_down()
            && let Some(job) = request.claim()
        {
            job.finish(Err(error.clone()));
            return Err(error);
        }
        Ok(())
    }

    /// The next request of one direction.
    pub fn pop(&self, direction: Direction) -> Option<Request> {
        self.waiting(direction).pop()
    }

    /// Returns true if no request waits.
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    /// Tells producers that a worker is about to sleep. Returns false if there is work after all;
    /// writes count as work only if `may_write`.
    pub fn may_sleep(&self, may_write: bool) -> bool {
        self.waker.announce_sleep();
        let has_work = !self.reads.is_empty() || (may_write && !self.writes.is_empty());
        if !has_work && !self.is_closed() {
            return true;
        }
        self.waker.withdraw_sleep();
        false
    }

    /// Takes the announcement of [`SubmitQueue::may_sleep`] back, after waking for another reason.
    pub fn woke(&self) {
        self.waker.withdraw_sleep();
    }

    /// The waker, for the worker.
    pub fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Refuses new requests and wakes `workers` sleepers so that they see it.
    pub fn close(&self, workers: usize) {
        self.closed.store(true, Ordering::SeqCst);
        for _ in 0..workers {
            self.waker.bell.ring();
        }
    }

    /// Returns true if [`SubmitQueue::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Marks the queue as dead: no worker serves it any more.
    pub fn poison(&self) {
        self.poisoned.store(true, Ordering::SeqCst);
        self.cancel_all();
    }

    /// Cancels everything that waits.
    pub fn cancel_all(&self) {
        for direction in [Direction::Read, Direction::Write] {
            while let Some(request) = self.pop(direction) {
                self.refuse(&request);
            }
        }
    }

    /// Answers a request that no worker will take any more.
    pub fn refuse(&self, request: &Request) {
        if let Some(job) = request.claim() {
            job.finish(Err(self.refuse_if_down().err().unwrap_or_else(closed)));
        }
    }

    fn refuse_if_down(&self) -> Result<()> {
        if self.poisoned.load(Ordering::SeqCst) {
            return Err(Error::new(
                ErrorKind::Poisoned,
                "the I/O worker of this store died; open a new store",
            ));
        }
        if self.is_closed() { Err(closed()) } else { Ok(()) }
    }

    fn waiting(&self, direction: Direction) -> &ArrayQueue<Request> {
        match direction {
            Direction::Read => &self.reads,
            Direction::Write => &self.writes,
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store is closed; open a new one")
}
