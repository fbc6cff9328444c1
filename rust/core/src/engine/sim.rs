//! A disk in memory that fails by a seeded plan: short I/O, `EIO`, `ENOSPC`, `EINTR`, bit flips,
//! and a pause that lasts until it is lifted.
//!
//! The faults of a piece depend on the seed, the direction, its place and how often that place was
//! asked for: not on threads or time, so a seed reproduces.

use std::collections::HashMap;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::config::Faults;
use crate::engine::batch::{Batch, Part};
use crate::engine::progress::Piece;
use crate::engine::psync::Disk;
use crate::meter::Direction;

/// The simulated disk; it runs behind the threads of [`crate::engine::psync`].
pub struct SimulatedDisk {
    faults: Faults,
    state: Mutex<State>,
    moving: Condvar,
}

struct State {
    bytes: Vec<u8>,
    paused: bool,
    asked: HashMap<(Direction, u64), u64>,
}

impl SimulatedDisk {
    /// An empty disk.
    pub fn new(faults: Faults) -> Self {
        let paused = faults.paused;
        let state = Mutex::new(State { bytes: Vec::new(), paused, asked: HashMap::new() });
        Self { faults, state, moving: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number in `[0, 1)` for this piece and question.
    fn chance(&self, direction: Direction, offset: u64, asked: u64, question: u64) -> f64 {
        let way = u64::from(direction == Direction::Write);
        let mut mixed = self.faults.seed;
        for word in [way, offset, asked, question] {
            mixed = splitmix(mixed ^ splitmix(word));
        }
        (mixed >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Disk for SimulatedDisk {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn transfer(&self, batch: &Batch, piece: &Piece) -> io::Result<usize> {
        // The rest of the piece is asked for again, as after any short transfer.
        let Some(Part { job, start, len }) = batch.parts(piece).next() else { return Ok(0) };
        let (direction, extent, buffer) = (batch.direction(), &job.extent, &job.buffer);
        let state = self.lock();
        let mut state = self
            .moving
            .wait_while(state, |state| state.paused)
            .unwrap_or_else(PoisonError::into_inner);
        let offset = extent.offset() + start as u64;
        let count = state.asked.entry((direction, offset)).or_insert(0);
        *count += 1;
        let asked = *count;
        let chance = |question| self.chance(direction, offset, asked, question);
        if chance(0) < self.faults.retry_rate {
            let errno = if chance(1) < 0.5 { libc::EINTR } else { libc::EAGAIN };
            return Err(io::Error::from_raw_os_error(errno));
        }
        if chance(2) < self.faults.io_error_rate {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let mut len = len;
        if chance(3) < self.faults.short_rate {
            len = ((len as f64 * chance(4)) as usize).max(1);
        }
        match direction {
            Direction::Write => {
                if self.faults.capacity_bytes.is_some_and(|most| offset + len as u64 > most) {
                    return Err(io::Error::from_raw_os_error(libc::ENOSPC));
                }
                let end = offset as usize + len;
                if state.bytes.len() < end {
                    state.bytes.resize(end, 0);
                }
                buffer.copy_out(start, &mut state.bytes[offset as usize..end]);
            }
            Direction::Read => {
                let have = state.bytes.len().saturating_sub(offset as usize);
                len = len.min(have);
                let mut piece = state.bytes[offset as usize..][..len].to_vec();
                if len > 0 && chance(5) < self.faults.bit_flip_rate {
                    let bit = (chance(6) * (len * 8) as f64) as usize;
                    piece[bit / 8] ^= 1 << (bit % 8);
                }
                buffer.copy_in(start, &piece);
            }
        }
        Ok(len)
    }

    fn resume(&self) {
        self.lock().paused = false;
        self.moving.notify_all();
    }
}

/// The mixing step of the splitmix64 generator (Steele, Lea, Flood, OOPSLA 2014).
fn splitmix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
