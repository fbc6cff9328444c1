//! Threads that call `preadv` and `pwritev`: the portable twin of `io_uring`, and its reference in
//! tests. Generic over the disk, so the simulator runs through the very same loop.
#![expect(unsafe_code, reason = "hands buffer addresses to preadv and pwritev")]

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::direction::Direction;
use crate::engine::batch::{Batch, Span};
use crate::engine::contract::{IoEngine, Setup};
use crate::engine::progress::Piece;
use crate::error::{Error, Result};

/// More threads than this gain nothing on one device: each moves whole pieces.
const THREADS_MAX: u32 = 4;

/// Something that moves bytes between memory and a file.
pub trait Disk: Send + Sync + 'static {
    /// The name users see.
    fn name(&self) -> &'static str;

    /// Moves a piece, or the beginning of it; returns how many bytes, like `preadv(2)` and
    /// `pwritev(2)`.
    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize>;

    /// Stops the disk before its next piece, if it can be paused.
    fn pause(&self) {}

    /// Lets a paused disk move.
    fn resume(&self) {}
}

/// The real disk.
pub struct Kernel;

impl Disk for Kernel {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize> {
        let vector: Vec<libc::iovec> = batch.spans(piece).iter().map(entry).collect();
        let (fd, count) = (batch.fd(), vector.len() as libc::c_int);
        let offset = batch.offset(piece) as libc::off_t;
        let moved = match batch.direction() {
            // SAFETY: `spans` checked that its addresses belong to the buffers, which the batch
            // keeps alive; a slot that is read into has no other user until its ticket is
            // answered.
            Direction::Read => unsafe { libc::preadv(fd, vector.as_ptr(), count, offset) },
            // SAFETY: as above; the kernel only reads from the buffers.
            Direction::Write => unsafe { libc::pwritev(fd, vector.as_ptr(), count, offset) },
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}

fn entry(span: &Span) -> libc::iovec {
    libc::iovec { iov_base: span.address.cast(), iov_len: span.len }
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

    fn pause(&self) {
        self.disk.pause();
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
    // Taken from the queue and waiting for this thread, by direction.
    let mut held = [None, None];
    while !queue.is_closed() {
        let [read, write] = &mut held;
        let next = Batch::take(setup, read, Direction::Read)
            .or_else(|| Batch::take(setup, write, Direction::Write));
        match next {
            Some(batch) => serve(setup, disk, batch),
            None if queue.may_sleep() => {
                if let Err(error) = queue.waker().consume() {
                    panic!("{error}");
                }
            }
            None => {}
        }
    }
    for request in held.iter().flatten() {
        queue.refuse(request);
    }
    drop(guard);
}

fn serve<D: Disk>(setup: &Setup, disk: &D, batch: Batch) {
    let mut waiting = vec![batch];
    while let Some(mut batch) = waiting.pop() {
        let answer = loop {
            let next = batch.progress().next_piece();
            if let Some(piece) = next {
                setup.meter.operation(batch.direction());
                let moved = disk.transfer(&batch, &piece);
                batch.progress().finish(piece, moved);
            } else if let Some(answer) = batch.progress().outcome() {
                break answer;
            }
        };
        waiting.extend(batch.finish(setup, &answer));
    }
}
