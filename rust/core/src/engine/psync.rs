//! Threads that call `preadv` and `pwritev`: the portable twin of `io_uring`, and its reference in
//! tests. Generic over the disk, so the simulator runs through the very same loop.
#![expect(unsafe_code, reason = "hands buffer addresses to preadv and pwritev")]

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::direction::Direction;
use crate::engine::batch::{Batch, Spans};
use crate::engine::contract::{IoEngine, Setup};
use crate::engine::progress::Piece;
use crate::error::{Error, Result};

/// More threads gain nothing on one device: each moves whole pieces of megabytes, and four of them
/// keep a drive busy.
const THREADS_MAX: u32 = 4;

/// Moves bytes between memory and a file.
pub trait Disk: Send + Sync + 'static {
    /// The name users see.
    fn name(&self) -> &'static str;

    /// Moves a piece, or the beginning of it. Returns the number of bytes, like `preadv(2)` and
    /// `pwritev(2)`.
    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize>;
}

/// The real disk.
pub struct Kernel;

impl Disk for Kernel {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize> {
        let (fd, offset) = (batch.fd(), batch.offset(piece) as libc::off_t);
        let moved = match batch.spans(piece) {
            Spans::Into(spans) => {
                let vector: Vec<_> =
                    spans.iter().map(|span| entry(span.address, span.len)).collect();
                // SAFETY: the addresses were checked to lie inside the targets, which the batch
                // keeps alive; a target has no other user until its ticket is answered.
                unsafe { libc::preadv(fd, vector.as_ptr(), vector.len() as libc::c_int, offset) }
            }
            Spans::From(spans) => {
                let vector: Vec<_> =
                    spans.iter().map(|span| entry(span.address.cast_mut(), span.len)).collect();
                // SAFETY: the addresses were checked to lie inside the sources, which the batch
                // keeps alive; the kernel only reads there.
                unsafe { libc::pwritev(fd, vector.as_ptr(), vector.len() as libc::c_int, offset) }
            }
        };
        usize::try_from(moved).map_err(|_| io::Error::last_os_error())
    }
}

/// The kernel's entry has one type for both directions; it cannot say that a source is only read.
fn entry(address: *mut u8, len: usize) -> libc::iovec {
    libc::iovec { iov_base: address.cast(), iov_len: len }
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
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                self.setup.queue.poison();
            }
        }
        self.setup.queue.cancel_all();
    }
}

impl<D: Disk> Drop for Psync<D> {
    fn drop(&mut self) {
        self.close();
    }
}

/// Poisons the queue if a worker unwinds. The dropped job of that worker answers `Poisoned`.
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
    // Requests that this thread took from the queue and has not begun, by direction.
    let mut held = [None, None];
    while !queue.is_closed() {
        let [read, write] = &mut held;
        let next = Batch::take(setup, read, Direction::Read)
            .or_else(|| Batch::take(setup, write, Direction::Write));
        match next {
            Some(batch) => serve(setup, disk, batch),
            None if queue.may_sleep(true) => {
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
            if let Some(piece) = batch.next_piece() {
                setup.statistics.operation(batch.direction());
                let moved = disk.transfer(&batch, &piece);
                batch.finish_piece(piece, moved);
            } else if let Some(answer) = batch.outcome() {
                break answer;
            }
        };
        waiting.extend(batch.finish(setup, &answer));
    }
}
