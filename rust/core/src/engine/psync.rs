//! Threads that call `pread` and `pwrite`: the portable twin of `io_uring`, and its reference in
//! tests. Generic over the disk, so the simulator runs through the very same loop.
#![expect(unsafe_code, reason = "hands buffer addresses to pread and pwrite")]

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::buffer::IoBuf;
use crate::engine::contract::{IoEngine, Setup};
use crate::engine::progress::Progress;
use crate::error::{Error, Result};
use crate::file::Extent;
use crate::meter::Direction;
use crate::queue::Request;

/// More threads than this gain nothing on one device: each moves whole pieces.
const THREADS_MAX: u32 = 4;

/// Something that moves bytes between a buffer and a place in a file.
pub trait Disk: Send + Sync + 'static {
    /// The name users see.
    fn name(&self) -> &'static str;

    /// Moves `len` bytes between `[start, …)` of `buffer` and the same place of `extent`; returns
    /// how many it moved, like `pread(2)` and `pwrite(2)`.
    fn transfer(
        &self,
        direction: Direction,
        extent: &Extent,
        buffer: &IoBuf,
        start: usize,
        len: usize,
    ) -> io::Result<usize>;

    /// Lets a paused disk move.
    fn resume(&self) {}
}

/// The real disk.
pub struct Kernel;

impl Disk for Kernel {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn transfer(
        &self,
        direction: Direction,
        extent: &Extent,
        buffer: &IoBuf,
        start: usize,
        len: usize,
    ) -> io::Result<usize> {
        let (fd, address) = (extent.file().fd(), buffer.piece(start, len));
        let offset = (extent.offset() + start as u64) as libc::off_t;
        let moved = match direction {
            // SAFETY: `piece` checked that `len` bytes at `address` belong to the buffer, which
            // the job keeps alive; a slot that is read into has no other user until its ticket is
            // answered.
            Direction::Read => unsafe { libc::pread(fd, address.cast(), len, offset) },
            // SAFETY: as above; the kernel only reads from the buffer.
            Direction::Write => unsafe { libc::pwrite(fd, address.cast(), len, offset) },
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}

/// A pool of threads in front of a [`Disk`].
pub struct Psync<D: Disk> {
    setup: Setup,
    disk: Arc<D>,
    threads: Vec<JoinHandle<()>>,
}

impl<D: Disk> Psync<D> {
    /// Starts the threads.
    pub fn start(setup: Setup, disk: D) -> Result<Self> {
        let disk = Arc::new(disk);
        let mut engine = Self { setup, disk, threads: Vec::new() };
        for index in 0..engine.setup.depth.min(THREADS_MAX) {
            let (setup, disk) = (engine.setup.clone(), Arc::clone(&engine.disk));
            let thread = std::thread::Builder::new()
                .name(format!("ssdtrain-io-{index}"))
                .spawn(move || work(&setup, &*disk));
            match thread {
                Ok(thread) => engine.threads.push(thread),
                Err(source) => {
                    engine.close();
                    return Err(Error::from_io(
                        "cannot start an I/O thread; see `ulimit -u`",
                        &source,
                    ));
                }
            }
        }
        Ok(engine)
    }
}

impl<D: Disk> IoEngine for Psync<D> {
    fn name(&self) -> &'static str {
        self.disk.name()
    }

    fn close(&mut self) {
        self.setup.queue.close(self.threads.len());
        self.disk.resume();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.setup.queue.poison();
            }
        }
        self.setup.queue.cancel_all();
    }

    fn resume(&self) {
        self.disk.resume();
    }
}

impl<D: Disk> Drop for Psync<D> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Poisons the queue if a worker unwinds; the job it held answers `Poisoned` as it is dropped.
struct PoisonGuard<'a>(&'a Setup);

impl Drop for PoisonGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.queue.poison();
        }
    }
}

fn work<D: Disk>(setup: &Setup, disk: &D) {
    let guard = PoisonGuard(setup);
    let queue = &setup.queue;
    while !queue.is_closed() {
        let next = queue.pop(Direction::Read).or_else(|| queue.pop(Direction::Write));
        match next {
            Some(request) => serve(setup, disk, &request),
            None if queue.may_sleep() => {
                if let Err(error) = queue.waker().consume() {
                    panic!("{error}");
                }
            }
            None => {}
        }
    }
    drop(guard);
}

fn serve<D: Disk>(setup: &Setup, disk: &D, request: &Request) {
    let Some(job) = request.claim() else { return };
    let (direction, len) = (job.direction, job.buffer.len());
    let mut progress =
        Progress::new(direction, job.extent.offset(), len, setup.piece_len, setup.alignment);
    setup.meter.begin(direction);
    if let Err(error) = job.prepare() {
        progress.abort(error);
    }
    let answer = loop {
        if request.is_abandoned() {
            progress.abandon();
        }
        if let Some(piece) = progress.next_piece() {
            let moved = disk.transfer(direction, &job.extent, &job.buffer, piece.start, piece.len);
            progress.finish(piece, moved);
        } else if let Some(answer) = progress.outcome() {
            break answer;
        }
    };
    setup.meter.end(direction, answer.is_ok().then_some(len as u64));
    job.finish(answer);
}
