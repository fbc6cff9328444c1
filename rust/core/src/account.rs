//! The bytes that are in memory because of us: what each holder holds, and how it ended.
//!
//! A holding is the entry of one holder; it ends when it is dropped, on whichever thread that is.
//! What several holders share (views of one storage) is counted once.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How what was held ended, or would end now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Stayed in memory.
    Kept,
    /// Written, or under way to the disk, but still in memory when it was needed.
    Forwarded,
    /// Written, and its memory freed.
    Offloaded,
}

/// How much ended in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Bytes of the holdings.
    pub bytes: u64,
    /// How many there were.
    pub count: u64,
}

/// What came by, whatever became of it since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// How many there were; each counts as often as it came.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of the largest.
    pub largest_bytes: u64,
}

/// What several holders of one storage hold together.
#[derive(Debug)]
struct Shared {
    bytes: u64,
    holder_count: u64,
}

/// Spreads addresses over a table; who chooses them is our own allocator, and not an attacker.
#[derive(Debug, Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }

    fn write_usize(&mut self, address: usize) {
        // Fibonacci hashing (Knuth, The Art of Computer Programming, section 6.4): the golden
        // ratio times 2^64. The table looks at the lowest and at the highest bits.
        let product = (self.0 ^ address as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

#[derive(Debug, Default)]
struct Books {
    held_bytes: u64,
    /// Of these, what is reserved.
    reserved_bytes: u64,
    peak_bytes: u64,
    /// The peak of what is in memory and not reserved.
    saved_peak_bytes: u64,
    /// What all holders need, in memory or not, and the most at once: without us, all of it would
    /// be in memory.
    alive_bytes: u64,
    alive_peak_bytes: u64,
    kept: Ended,
    forwarded: Ended,
    offloaded: Ended,
    small: Passed,
    /// What small tensors that nobody is asked for may fill; none before somebody says so.
    small_limit_bytes: u64,
    weight_count: u64,
    shared: HashMap<usize, Shared, BuildHasherDefault<AddressHasher>>,
}

impl Books {
    fn hold_shared(&mut self, identity: usize, nbytes: u64, storage_bytes: u64) {
        let shared = self.shared.entry(identity).or_insert(Shared { bytes: 0, holder_count: 0 });
        let more = nbytes.min(storage_bytes.saturating_sub(shared.bytes));
        shared.bytes += more;
        shared.holder_count += 1;
        self.held_bytes += more;
        self.begin(more);
    }

    fn begin(&mut self, bytes: u64) {
        self.alive_bytes += bytes;
        self.alive_peak_bytes = self.alive_peak_bytes.max(self.alive_bytes);
    }

    fn shared_more_bytes(&self, identity: usize, nbytes: u64, storage_bytes: u64) -> u64 {
        let held = self.shared.get(&identity).map_or(0, |shared| shared.bytes);
        nbytes.min(storage_bytes.saturating_sub(held))
    }

    fn note_peak(&mut self, transfer_bytes: u64) {
        let resident_bytes = self.held_bytes + transfer_bytes;
        self.peak_bytes = self.peak_bytes.max(resident_bytes);
        self.saved_peak_bytes = self.saved_peak_bytes.max(resident_bytes - self.reserved_bytes);
    }

    fn end(&mut self, fate: Fate, bytes: u64) {
        let ended = match fate {
            Fate::Kept => &mut self.kept,
            Fate::Forwarded => &mut self.forwarded,
            Fate::Offloaded => &mut self.offloaded,
        };
        ended.bytes += bytes;
        ended.count += 1;
    }
}

/// One account; clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<Mutex<Books>>);

impl Account {
    /// Opens an account in which nothing is held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts bytes until the holding is dropped or freed.
    #[must_use]
    pub fn hold(&self, nbytes: u64) -> Holding {
        let mut books = self.books();
        books.held_bytes += nbytes;
        books.begin(nbytes);
        drop(books);
        let state = Mutex::new(State { fate: Fate::Kept, is_held: true, is_lent: false });
        Holding { account: self.clone(), nbytes, state }
    }

    /// Counts bytes that somebody may fill, whatever is in them; none of them ends in any way.
    #[must_use]
    pub fn reserve(&self, nbytes: u64) -> Reservation {
        let reservation = Reservation { account: self.clone(), nbytes: Mutex::new(0) };
        reservation.resize(nbytes);
        reservation
    }

    /// Counts bytes of a storage that stays; all its holders count together at most as much as it.
    ///
    /// `identity` is the storage's for as long as one of them lives.
    #[must_use]
    pub fn hold_shared(&self, identity: usize, nbytes: u64, storage_bytes: u64) -> SharedHolding {
        self.books().hold_shared(identity, nbytes, storage_bytes);
        SharedHolding { account: self.clone(), identity }
    }

    /// The same for a small storage as a whole, and for the peak, with what transfers hold beside.
    /// `None` if there is no room below the limit of [`limit_small`](Self::limit_small).
    #[must_use]
    pub fn hold_small(
        &self,
        identity: usize,
        nbytes: u64,
        transfer_bytes: u64,
    ) -> Option<SharedHolding> {
        let mut books = self.books();
        let more_bytes = books.shared_more_bytes(identity, nbytes, nbytes);
        if books.held_bytes + transfer_bytes + more_bytes > books.small_limit_bytes {
            return None;
        }
        books.hold_shared(identity, nbytes, nbytes);
        let small = &mut books.small;
        small.count += 1;
        small.bytes += nbytes;
        small.largest_bytes = small.largest_bytes.max(nbytes);
        books.note_peak(transfer_bytes);
        Some(SharedHolding { account: self.clone(), identity })
    }

    /// Lets `hold_small` hold as long as not more than so many bytes are in memory.
    pub fn limit_small(&self, nbytes: u64) {
        self.books().small_limit_bytes = nbytes;
    }

    /// Counts a weight, which is not held because of us.
    pub fn note_weight(&self) {
        self.books().weight_count += 1;
    }

    /// What `hold_small` was called for so far.
    #[must_use]
    pub fn small(&self) -> Passed {
        self.books().small
    }

    /// How many weights were noted.
    #[must_use]
    pub fn weight_count(&self) -> u64 {
        self.books().weight_count
    }

    /// The bytes that `hold_shared` would add.
    #[must_use]
    pub fn shared_more_bytes(&self, identity: usize, nbytes: u64, storage_bytes: u64) -> u64 {
        self.books().shared_more_bytes(identity, nbytes, storage_bytes)
    }

    /// The sum over all holdings.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.books().held_bytes
    }

    /// The sum over all reservations, which is a part of that.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.books().reserved_bytes
    }

    /// The most that was in memory at once, since the last [`forget_peak`](Self::forget_peak).
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.books().peak_bytes
    }

    /// The most that was in memory at once and not reserved.
    #[must_use]
    pub fn saved_peak_bytes(&self) -> u64 {
        self.books().saved_peak_bytes
    }

    /// The most that all holders needed at once, in memory or not.
    #[must_use]
    pub fn alive_peak_bytes(&self) -> u64 {
        self.books().alive_peak_bytes
    }

    /// Forgets the peaks of what was in memory until now.
    pub fn forget_peak(&self) {
        let mut books = self.books();
        (books.peak_bytes, books.saved_peak_bytes) = (0, 0);
    }

    /// Compares what is held, and what transfers hold beside it, with the peak.
    pub fn note_peak(&self, transfer_bytes: u64) {
        self.books().note_peak(transfer_bytes);
    }

    /// What ended in one way.
    #[must_use]
    pub fn ended(&self, fate: Fate) -> Ended {
        let books = self.books();
        match fate {
            Fate::Kept => books.kept,
            Fate::Forwarded => books.forwarded,
            Fate::Offloaded => books.offloaded,
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // Nothing in this file panics between two changes that belong together.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct State {
    fate: Fate,
    is_held: bool,
    is_lent: bool,
}

/// The bytes of one holder, all in memory or none.
#[derive(Debug)]
pub struct Holding {
    account: Account,
    nbytes: u64,
    state: Mutex<State>,
}

impl Holding {
    /// Notes that the bytes are on the disk, and in memory no more.
    pub fn free(&self) {
        let mut state = self.state();
        if state.is_held {
            self.account.books().held_bytes -= self.nbytes;
        }
        state.fate = Fate::Offloaded;
        state.is_held = false;
    }

    /// Notes that somebody else holds the bytes: they are not in memory because of us.
    pub fn lend(&self) {
        let mut state = self.state();
        let mut books = self.account.books();
        if state.is_held {
            books.held_bytes -= self.nbytes;
        }
        if !state.is_lent {
            books.alive_bytes -= self.nbytes;
        }
        state.is_held = false;
        state.is_lent = true;
    }

    /// Notes that nobody else holds the bytes any more.
    pub fn take_back(&self) {
        let mut state = self.state();
        let mut books = self.account.books();
        if !state.is_held {
            books.held_bytes += self.nbytes;
        }
        if state.is_lent {
            books.begin(self.nbytes);
        }
        state.is_held = true;
        state.is_lent = false;
    }

    /// Says how it would end now.
    pub fn set_fate(&self, fate: Fate) {
        self.state().fate = fate;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let state = self.state();
        let mut books = self.account.books();
        if state.is_held {
            books.held_bytes -= self.nbytes;
        }
        if !state.is_lent {
            books.alive_bytes -= self.nbytes;
        }
        books.end(state.fate, self.nbytes);
    }
}

/// Memory that somebody may fill; counted until it is given back or dropped.
#[derive(Debug)]
pub struct Reservation {
    account: Account,
    nbytes: Mutex<u64>,
}

impl Reservation {
    /// Counts so many bytes from now on.
    pub fn resize(&self, nbytes: u64) {
        let mut reserved = self.nbytes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut books = self.account.books();
        books.held_bytes = books.held_bytes - *reserved + nbytes;
        books.reserved_bytes = books.reserved_bytes - *reserved + nbytes;
        *reserved = nbytes;
    }

    /// How many bytes are counted.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        *self.nbytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.resize(0);
    }
}

/// The part of one holder in what several hold.
#[derive(Debug)]
pub struct SharedHolding {
    account: Account,
    identity: usize,
}

impl Drop for SharedHolding {
    fn drop(&mut self) {
        let mut books = self.account.books();
        let Some(shared) = books.shared.get_mut(&self.identity) else { return };
        shared.holder_count -= 1;
        if shared.holder_count == 0 {
            let bytes = shared.bytes;
            books.shared.remove(&self.identity);
            books.held_bytes -= bytes;
            books.alive_bytes -= bytes;
            books.end(Fate::Kept, bytes);
        }
    }
}
