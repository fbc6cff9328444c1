//! A disk in memory that fails by a seeded plan: short I/O, errors of every kind, bit flips, pieces
//! that others overtake, a device that goes away, and a pause that lasts until it is lifted.
//!
//! The faults of a piece depend on the seed, the direction, the offset and the number of requests
//! for that offset. They do not depend on threads or time, so a seed reproduces them. The clock
//! ticks with every piece that ends, so a late piece costs no waiting. The order of the threads is
//! not under control: it decides which piece overtakes which, and which piece is the last before
//! the device goes away, unless the queue is one piece deep.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::config::{Faults, PauseSwitch};
use crate::direction::Direction;
use crate::engine::batch::{Batch, Part};
use crate::engine::contract::{IoEngine, Setup};
use crate::engine::progress::Piece;
use crate::engine::psync::{Disk, Psync};
use crate::error::Result;
use crate::queue::{JobMemory, SubmitQueue};

/// Largest number of pieces that overtake a late piece: more than there are threads, so that each
/// thread can end a piece and begin another meanwhile.
const LATE_TICKS_MAX: f64 = 6.0;

/// The threads of [`crate::engine::psync`] in front of a simulated disk.
pub struct Simulated {
    engine: Psync<SimulatedDisk>,
    queue: Arc<SubmitQueue>,
    pause: PauseSwitch,
    is_closing: Arc<AtomicBool>,
}

impl Simulated {
    /// Starts the threads on an empty disk that fails by the plan of `faults`.
    pub fn start(setup: Setup, faults: Faults) -> Result<Self> {
        let (queue, pause, is_closing) =
            (Arc::clone(&setup.queue), faults.pause.clone(), Arc::default());
        let disk = SimulatedDisk::new(faults, Arc::clone(&is_closing));
        Ok(Self { engine: Psync::start(setup, disk)?, queue, pause, is_closing })
    }
}

impl IoEngine for Simulated {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn close(&mut self) {
        // Pieces that wait for a paused disk must move; later pieces must not begin.
        self.queue.close(0);
        self.is_closing.store(true, Ordering::SeqCst);
        self.pause.ask_again();
        self.engine.close();
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        self.close();
    }
}

/// The disk itself.
pub struct SimulatedDisk {
    faults: Faults,
    is_closing: Arc<AtomicBool>,
    state: Mutex<State>,
    moving: Condvar,
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    asked: HashMap<(Direction, u64), u64>,
    begun_count: u64,
    /// Threads that have a piece here, and the times at which the late threads may go on.
    inside_count: usize,
    due: Vec<u64>,
    clock: u64,
}

/// The input of chance: a piece, and the number of requests for its offset.
struct Ask {
    seed: u64,
    direction: Direction,
    offset: u64,
    asked: u64,
}

/// The questions that chance answers, each independently.
#[derive(Clone, Copy)]
enum Question {
    Retry,
    WhichRetry,
    IoError,
    SpaceError,
    WhichSpaceError,
    Zero,
    Short,
    HowShort,
    BitFlip,
    WhichBit,
    Late,
    HowLate,
}

impl Ask {
    /// A number in `[0, 1)` for this question.
    fn chance(&self, question: Question) -> f64 {
        let way = u64::from(self.direction == Direction::Write);
        let mut mixed = self.seed;
        for word in [way, self.offset, self.asked, question as u64] {
            mixed = splitmix(mixed ^ splitmix(word));
        }
        (mixed >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl SimulatedDisk {
    fn new(faults: Faults, is_closing: Arc<AtomicBool>) -> Self {
        Self { faults, is_closing, state: Mutex::default(), moving: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, mut still: impl FnMut(&State) -> bool) -> MutexGuard<'_, State> {
        self.moving
            .wait_while(self.lock(), |state| still(state))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until other pieces have overtaken this piece, or no other can.
    fn be_late(&self, ask: &Ask) {
        let ticks = 1 + (ask.chance(Question::HowLate) * LATE_TICKS_MAX) as u64;
        // Lets other threads come meanwhile.
        std::thread::yield_now();
        let mut state = self.lock();
        let due = state.clock + ticks;
        state.due.push(due);
        state.skip_idle_time();
        drop(state);
        self.moving.notify_all();
        let mut state = self.wait_while(|state| state.clock < due);
        let index = state.due.iter().position(|&other| other == due);
        state.due.swap_remove(index.expect("only its owner takes a time back"));
    }

    /// The error that the plan has for a piece; `None` if the piece succeeds.
    fn failure(&self, ask: &Ask, end: u64, begun_count: u64) -> Option<i32> {
        let Faults { retry_rate, io_error_rate, space_error_rate, .. } = self.faults;
        if self.faults.gone_after_count.is_some_and(|most| begun_count > most) {
            return Some(libc::ENODEV);
        }
        if ask.chance(Question::Retry) < retry_rate {
            let interrupted = ask.chance(Question::WhichRetry) < 0.5;
            return Some(if interrupted { libc::EINTR } else { libc::EAGAIN });
        }
        if ask.chance(Question::IoError) < io_error_rate {
            return Some(libc::EIO);
        }
        if ask.direction == Direction::Read {
            return None;
        }
        if ask.chance(Question::SpaceError) < space_error_rate {
            let kinds = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG];
            return Some(kinds[(ask.chance(Question::WhichSpaceError) * 3.0) as usize]);
        }
        self.faults.capacity_bytes.is_some_and(|most| end > most).then_some(libc::ENOSPC)
    }

    /// Number of bytes that this piece moves, of `len`.
    fn moved_len(&self, ask: &Ask, len: usize) -> usize {
        if ask.chance(Question::Zero) < self.faults.zero_rate {
            0
        } else if ask.chance(Question::Short) < self.faults.short_rate {
            ((len as f64 * ask.chance(Question::HowShort)) as usize).max(1)
        } else {
            len
        }
    }
}

impl Disk for SimulatedDisk {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize> {
        // The rest of the piece is sent again, as after any short transfer.
        let Some(Part { job, start, len }) = batch.parts(piece).next() else { return Ok(0) };
        let (direction, extent) = (batch.direction(), &job.extent);
        let (seed, offset) = (self.faults.seed, extent.offset() + start as u64);
        // Direct I/O refuses unaligned addresses, offsets and lengths. `alignment` is a power of
        // two, so all of them are multiples if their bitwise or is.
        let bits = match &job.memory {
            JobMemory::From(source) => source.address(start, len) as usize | len,
            JobMemory::Into(landing) => landing
                .spans(start, len)
                .fold(0, |bits, span| bits | span.address as usize | span.len),
        };
        if !(offset | bits as u64).is_multiple_of(extent.file().alignment() as u64) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.faults.pause.wait_unless(|| self.is_closing.load(Ordering::SeqCst));
        let mut state = self.lock();
        let asked = state.ask(direction, offset);
        let begun_count = state.begun_count;
        drop(state);
        let ask = Ask { seed, direction, offset, asked };
        if ask.chance(Question::Late) < self.faults.late_rate {
            self.be_late(&ask);
        }
        let len = self.moved_len(&ask, len);
        let failure = self.failure(&ask, offset + len as u64, begun_count);
        let mut state = self.lock();
        state.inside_count -= 1;
        state.clock += 1;
        state.skip_idle_time();
        self.moving.notify_all();
        match (failure, &job.memory) {
            (Some(errno), _) => Err(io::Error::from_raw_os_error(errno)),
            (None, JobMemory::From(source)) => {
                source.copy_out(start, state.stored(offset, len));
                Ok(len)
            }
            (None, JobMemory::Into(landing)) => {
                let mut piece = state.stored(offset, len).to_vec();
                if len > 0 && ask.chance(Question::BitFlip) < self.faults.bit_flip_rate {
                    let bit = (ask.chance(Question::WhichBit) * (len * 8) as f64) as usize;
                    piece[bit / 8] ^= 1 << (bit % 8);
                }
                landing.copy_in(start, &piece);
                Ok(len)
            }
        }
    }
}

impl State {
    /// Counts a piece that begins; returns the number of requests for its offset so far.
    fn ask(&mut self, direction: Direction, offset: u64) -> u64 {
        self.inside_count += 1;
        self.begun_count += 1;
        let count = self.asked.entry((direction, offset)).or_insert(0);
        *count += 1;
        *count
    }

    /// If every thread here is late, moves the clock to the earliest time at which a thread may go
    /// on.
    fn skip_idle_time(&mut self) {
        if self.due.len() == self.inside_count
            && let Some(&next) = self.due.iter().min()
        {
            self.clock = self.clock.max(next);
        }
    }

    /// The bytes of a range. Bytes that were never written are zero.
    fn stored(&mut self, offset: u64, len: usize) -> &mut [u8] {
        let (start, end) = (offset as usize, offset as usize + len);
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        &mut self.bytes[start..end]
    }
}

/// The mixing step of the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014).
fn splitmix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
