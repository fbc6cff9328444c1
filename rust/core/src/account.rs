//! The bytes that are in memory because of `ssdtrain`: the bytes of each holder, and how they
//! ended.
//!
//! A holding is the entry of one holder. It ends when it is dropped, on any thread. Bytes that
//! several holders share (views of one storage) count once.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The way in which a holding ended, or would end now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It stayed in memory.
    Kept,
    /// It was written, or was under way to the disk, but was still in memory when it was needed.
    Forwarded,
    /// It was written, and its memory was freed.
    Offloaded,
    /// It was neither kept nor written, because it can be made again from others.
    Rematerialized,
}

/// The holdings that ended in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Bytes of the holdings.
    pub bytes: u64,
    /// Number of holdings.
    pub count: u64,
}

/// Storages that were counted, wherever they are now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// Number of storages; a storage counts as often as it came.
    pub count: u64,
    /// Sum of their bytes.
    pub bytes: u64,
    /// Bytes of the largest storage.
    pub largest_bytes: u64,
}

/// The bytes that several holders of one storage hold together.
#[derive(Debug)]
struct Shared {
    bytes: u64,
    holder_count: u64,
}

/// Spreads addresses over a table. Our own allocator chooses the addresses, not an attacker.
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
    /// The reserved part of `held_bytes`.
    reserved_bytes: u64,
    peak_bytes: u64,
    /// The peak of the bytes that are in memory and not reserved.
    saved_peak_bytes: u64,
    /// The peak of the bytes in memory since it was taken last.
    recent_peak_bytes: u64,
    /// Beyond it, memory should be let go before more is held; `None`: there is no such limit.
    soft_limit_bytes: Option<u64>,
    /// The bytes that all holders need, in memory or not, and their peak. Without `ssdtrain` all of
    /// them would be in memory.
    alive_bytes: u64,
    alive_peak_bytes: u64,
    kept: Ended,
    forwarded: Ended,
    offloaded: Ended,
    rematerialized: Ended,
    small: Passed,
    /// Bytes in memory up to which `hold_small` holds storages; zero until it is set.
    small_limit_bytes: u64,
    weight_count: u64,
    shared: HashMap<usize, Shared, BuildHasherDefault<AddressHasher>>,
}

impl Books {
    /// Returns the bytes that were added.
    fn hold_shared(&mut self, identity: usize, nbytes: u64, storage_bytes: u64) -> u64 {
        let shared = self.shared.entry(identity).or_insert(Shared { bytes: 0, holder_count: 0 });
        let more = nbytes.min(storage_bytes.saturating_sub(shared.bytes));
        shared.bytes += more;
        shared.holder_count += 1;
        self.held_bytes += more;
        self.begin(more);
        more
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
        self.recent_peak_bytes = self.recent_peak_bytes.max(resident_bytes);
        self.saved_peak_bytes = self.saved_peak_bytes.max(resident_bytes - self.reserved_bytes);
    }

    fn end(&mut self, fate: Fate, bytes: u64) {
        let ended = match fate {
            Fate::Kept => &mut self.kept,
            Fate::Forwarded => &mut self.forwarded,
            Fate::Offloaded => &mut self.offloaded,
            Fate::Rematerialized => &mut self.rematerialized,
        };
        ended.bytes += bytes;
        ended.count += 1;
    }
}

/// An account. Clones share one set of books.
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

    /// Counts bytes of memory that others may fill, full or empty. A reservation has no [`Fate`].
    #[must_use]
    pub fn reserve(&self, nbytes: u64) -> Reservation {
        let reservation = Reservation { account: self.clone(), nbytes: Mutex::new(0) };
        reservation.resize(nbytes);
        reservation
    }

    /// Counts bytes of a storage that stays. All its holders together count at most
    /// `storage_bytes`.
    ///
    /// `identity` identifies the storage while one of its holders lives.
    #[must_use]
    pub fn hold_shared(&self, identity: usize, nbytes: u64, storage_bytes: u64) -> SharedHolding {
        self.books().hold_shared(identity, nbytes, storage_bytes);
        SharedHolding { account: self.clone(), identity }
    }

    /// Like [`hold_shared`](Self::hold_shared); notes the peak too, with the bytes that transfers
    /// hold. Returns also the bytes that were added.
    #[must_use]
    pub fn hold_passed(
        &self,
        identity: usize,
        nbytes: u64,
        storage_bytes: u64,
        transfer_bytes: u64,
    ) -> (SharedHolding, u64) {
        let mut books = self.books();
        let more_bytes = books.hold_shared(identity, nbytes, storage_bytes);
        books.note_peak(transfer_bytes);
        (SharedHolding { account: self.clone(), identity }, more_bytes)
    }

    /// Like [`hold_shared`](Self::hold_shared) for a small storage as a whole; notes the peak too,
    /// with the bytes that transfers hold. `None` if there is no room below the limit of
    /// [`limit_small`](Self::limit_small).
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

    /// Lets `hold_small` hold storages while at most `nbytes` are in memory.
    pub fn limit_small(&self, nbytes: u64) {
        self.books().small_limit_bytes = nbytes;
    }

    /// Counts a weight. Its bytes are not in memory because of `ssdtrain`.
    pub fn note_weight(&self) {
        self.books().weight_count += 1;
    }

    /// The storages that `hold_small` held so far.
    #[must_use]
    pub fn small(&self) -> Passed {
        self.books().small
    }

    /// Number of weights that were noted.
    #[must_use]
    pub fn weight_count(&self) -> u64 {
        self.books().weight_count
    }

    /// The bytes that `hold_shared` would add.
    #[must_use]
    pub fn shared_more_bytes(&self, identity: usize, nbytes: u64, storage_bytes: u64) -> u64 {
        self.books().shared_more_bytes(identity, nbytes, storage_bytes)
    }

    /// Returns true if this is the same account.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The sum over all holdings.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.books().held_bytes
    }

    /// The sum over all reservations, which is a part of [`held_bytes`](Self::held_bytes).
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        self.books().reserved_bytes
    }

    /// The most that was in memory at once, since the last [`forget_peak`](Self::forget_peak).
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.books().peak_bytes
    }

    /// The most that was in memory at once and not reserved, since the last
    /// [`begin_saved_peaks`](Self::begin_saved_peaks).
    #[must_use]
    pub fn saved_peak_bytes(&self) -> u64 {
        self.books().saved_peak_bytes
    }

    /// The most that all holders needed at once, in memory or not, since then.
    #[must_use]
    pub fn alive_peak_bytes(&self) -> u64 {
        self.books().alive_peak_bytes
    }

    /// The most that was in memory at once since the last call of this.
    #[must_use]
    pub fn take_recent_peak(&self) -> u64 {
        std::mem::take(&mut self.books().recent_peak_bytes)
    }

    /// Sets the bytes in memory beyond which memory should be let go before more is held.
    pub fn limit_softly(&self, nbytes: u64) {
        self.books().soft_limit_bytes = Some(nbytes);
    }

    /// That limit; `u64::MAX` if there is none.
    #[must_use]
    pub fn soft_limit_bytes(&self) -> u64 {
        self.books().soft_limit_bytes.unwrap_or(u64::MAX)
    }

    /// The bytes that may still be held below that limit; `u64::MAX` if there is none.
    #[must_use]
    pub fn soft_room_bytes(&self, transfer_bytes: u64) -> u64 {
        let books = self.books();
        let resident_bytes = books.held_bytes + transfer_bytes;
        books.soft_limit_bytes.map_or(u64::MAX, |limit| limit.saturating_sub(resident_bytes))
    }

    /// Resets the peaks of the bytes in memory.
    pub fn forget_peak(&self) {
        let mut books = self.books();
        (books.peak_bytes, books.saved_peak_bytes) = (0, 0);
    }

    /// Begins the peaks of saved bytes anew: of those in memory, and of those that holders need.
    pub fn begin_saved_peaks(&self) {
        let mut books = self.books();
        books.saved_peak_bytes = books.held_bytes - books.reserved_bytes;
        books.alive_peak_bytes = books.alive_bytes;
    }

    /// Compares the bytes held here and by transfers with the peak.
    pub fn note_peak(&self, transfer_bytes: u64) {
        self.books().note_peak(transfer_bytes);
    }

    /// The holdings that ended in one way.
    #[must_use]
    pub fn ended(&self, fate: Fate) -> Ended {
        let books = self.books();
        match fate {
            Fate::Kept => books.kept,
            Fate::Forwarded => books.forwarded,
            Fate::Offloaded => books.offloaded,
            Fate::Rematerialized => books.rematerialized,
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
    /// The account that it is an entry of.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Notes that the bytes are on the disk, or that they will be made again, and that they are in
    /// memory no more.
    pub fn free(&self, fate: Fate) {
        let mut state = self.state();
        if state.is_held {
            self.account.books().held_bytes -= self.nbytes;
        }
        state.fate = fate;
        state.is_held = false;
    }

    /// Notes that another owner holds the bytes: they are not in memory because of `ssdtrain`.
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

    /// Notes that the other owner does not hold the bytes any more.
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

    /// Sets the way in which it would end now.
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

/// Memory that others may fill; counted until it is given back or dropped.
#[derive(Debug)]
pub struct Reservation {
    account: Account,
    nbytes: Mutex<u64>,
}

impl Reservation {
    /// Counts `nbytes` from now on.
    pub fn resize(&self, nbytes: u64) {
        let mut reserved = self.nbytes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut books = self.account.books();
        books.held_bytes = books.held_bytes - *reserved + nbytes;
        books.reserved_bytes = books.reserved_bytes - *reserved + nbytes;
        *reserved = nbytes;
    }

    /// Number of bytes that are counted.
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

/// The share of one holder in a storage that several hold.
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
