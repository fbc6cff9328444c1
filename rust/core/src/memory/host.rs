//! Memory by the access of the kernel: it reads from it, or writes into it. It is memory of the
//! CPU, except slots on a GPU.
//!
//! ```text
//! HostSource   the kernel reads        a tensor that is written to the disk
//! HostTarget   the kernel writes too   a slot of the arena, or memory lent for a read
//! ```
//!
//! There are two types, so that no engine can write into memory that was lent for reading: a source
//! never gives a `*mut`, and the maker of a target promises that nobody else uses the memory.
//! Memory of a GPU is marked: only an engine that moves such memory gets it, and no function here
//! touches its bytes.
#![expect(unsafe_code, reason = "hands out raw addresses to the kernel")]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::arena::{PAGE_BYTES, Slot};

/// An object that keeps memory alive. It is dropped at some time, on any thread, and never
/// accessed.
struct Owner(#[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send>);

// SAFETY: no method takes `&self`, so several threads that share it can do nothing at once.
unsafe impl Sync for Owner {}

/// Memory that the kernel may read from, and that nobody here writes into.
#[derive(Clone)]
pub struct HostSource {
    address: NonNull<u8>,
    len: usize,
    is_on_gpu: bool,
    owner: Arc<Owner>,
}

// SAFETY: the memory is only read, its owner is `Send` and never looked at, and the promise made to
// `HostSource::new` holds on every thread.
unsafe impl Send for HostSource {}
// SAFETY: as above; there is no interior state.
unsafe impl Sync for HostSource {}

impl HostSource {
    /// The same bytes as memory of a GPU, which the CPU cannot reach.
    #[must_use]
    pub fn on_gpu(self) -> Self {
        Self { is_on_gpu: true, ..self }
    }

    /// Returns true if it is memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// Lends `len` bytes at `address` for reading.
    ///
    /// # Safety
    /// The address is readable by the CPU, or is memory [`on_gpu`](Self::on_gpu). The pages that
    /// hold the bytes must stay mapped and readable until `owner` is dropped. If the bytes change
    /// meanwhile, the stored bytes are unspecified, and the caller must not use them.
    pub unsafe fn new(address: NonNull<u8>, len: usize, owner: Box<dyn Any + Send>) -> Self {
        Self { address, len, is_on_gpu: false, owner: Arc::new(Owner(owner)) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The blocks of `alignment` bytes that the source touches, and the offset of the source in
    /// them. This widening spares unaligned tensors a copy.
    ///
    /// # Panics
    /// If `alignment` is more than a page, because the blocks might not be mapped.
    #[must_use]
    pub fn widened(self, alignment: usize) -> (Self, usize) {
        assert!(alignment <= PAGE_BYTES && alignment.is_power_of_two(), "widened beyond a page");
        let head = self.address.as_ptr() as usize % alignment;
        let start = self.address.as_ptr().wrapping_sub(head);
        let address =
            NonNull::new(start).expect("no byte lies in the first page of the address space");
        let len = (head + self.len).next_multiple_of(alignment);
        (Self { address, len, ..self }, head)
    }

    /// The part `[start, start + len)`, which keeps the whole memory alive.
    ///
    /// # Panics
    /// If it does not lie inside the source.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Self {
        let address = self.address(start, len).cast_mut();
        let address = NonNull::new(address).expect("an address inside memory is not null");
        Self { address, len, is_on_gpu: self.is_on_gpu, owner: Arc::clone(&self.owner) }
    }

    /// Address of the bytes `[start, start + len)`, for the kernel to read.
    ///
    /// # Panics
    /// If they do not lie inside the source.
    pub fn address(&self, start: usize, len: usize) -> *const u8 {
        assert_inside(start, len, self.len);
        // SAFETY: the assertion keeps the address inside the memory.
        unsafe { self.address.as_ptr().add(start) }
    }

    /// Copies the bytes at `start` to `bytes`.
    pub fn copy_out(&self, start: usize, bytes: &mut [u8]) {
        assert_on_cpu(self.is_on_gpu);
        let from = self.address(start, bytes.len());
        // SAFETY: `address` checked the range, and a fresh `&mut` cannot overlap the source.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Adds the bytes of `range` to a checksum. If they change meanwhile, the checksum is of no
    /// use.
    pub fn hash(&self, range: Range<usize>, sum: &mut Checksum) {
        assert_on_cpu(self.is_on_gpu);
        let address = self.address(range.start, range.len());
        // SAFETY: `address` checked the range, and the lender of the memory promised that it is
        // readable.
        sum.update(unsafe { std::slice::from_raw_parts(address, range.len()) });
    }
}

impl From<Arc<Slot>> for HostSource {
    fn from(slot: Arc<Slot>) -> Self {
        let address = NonNull::new(slot.address()).expect("a slot lies inside the arena");
        Self { address, len: slot.len(), is_on_gpu: false, owner: Arc::new(Owner(Box::new(slot))) }
    }
}

/// Memory that the kernel may write into, and that nobody else uses meanwhile.
#[derive(Clone)]
pub struct HostTarget {
    address: NonNull<u8>,
    len: usize,
    is_on_gpu: bool,
    owner: Arc<Owner>,
}

// SAFETY: the memory belongs to the holder of the target, its owner is `Send` and never accessed,
// and the promise made to `HostTarget::new` holds on every thread.
unsafe impl Send for HostTarget {}
// SAFETY: as above; no two threads are given the same bytes of one read.
unsafe impl Sync for HostTarget {}

impl HostTarget {
    /// The same bytes as memory of a GPU, which the CPU cannot reach.
    #[must_use]
    pub fn on_gpu(self) -> Self {
        Self { is_on_gpu: true, ..self }
    }

    /// Returns true if it is memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// Lends `len` bytes at `address` for a read to write into.
    ///
    /// # Safety
    /// The address is writable by the CPU, or is memory [`on_gpu`](Self::on_gpu). The bytes must
    /// stay mapped and writable until `owner` is dropped, and nobody else may read or write them
    /// before that.
    pub unsafe fn new(address: NonNull<u8>, len: usize, owner: Box<dyn Any + Send>) -> Self {
        Self { address, len, is_on_gpu: false, owner: Arc::new(Owner(owner)) }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part `[start, start + len)`, which keeps the whole memory alive.
    ///
    /// # Panics
    /// If it does not lie inside the target.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Self {
        let address = NonNull::new(self.address(start, len));
        let address = address.expect("an address inside memory is not null");
        Self { address, len, is_on_gpu: self.is_on_gpu, owner: Arc::clone(&self.owner) }
    }

    /// Address of the bytes `[start, start + len)`, for the kernel to write into.
    ///
    /// # Panics
    /// If they do not lie inside the target.
    pub fn address(&self, start: usize, len: usize) -> *mut u8 {
        assert_inside(start, len, self.len);
        // SAFETY: the assertion keeps the address inside the memory.
        unsafe { self.address.as_ptr().add(start) }
    }

    /// Copies `bytes` to the bytes at `start`.
    pub fn copy_in(&self, start: usize, bytes: &[u8]) {
        assert_on_cpu(self.is_on_gpu);
        let to = self.address(start, bytes.len());
        // SAFETY: `address` checked the range; the memory is written only by the one read that has
        // it until its ticket is answered, and a shared slice cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies the bytes at `start` to `bytes`.
    pub fn copy_out(&self, start: usize, bytes: &mut [u8]) {
        assert_on_cpu(self.is_on_gpu);
        let from = self.address(start, bytes.len());
        // SAFETY: `address` checked the range, and a fresh `&mut` cannot overlap the target.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Copies `len` bytes at `start` to `other_start` of another target.
    pub fn copy_to(&self, start: usize, other: &Self, other_start: usize, len: usize) {
        assert_on_cpu(self.is_on_gpu || other.is_on_gpu);
        let (from, to) = (self.address(start, len), other.address(other_start, len));
        // SAFETY: `address` checked both ranges; `copy` allows that they overlap.
        unsafe { std::ptr::copy(from, to, len) }
    }

    /// Adds the bytes of `range`, which have been read, to a checksum.
    pub fn hash(&self, range: Range<usize>, sum: &mut Checksum) {
        assert_on_cpu(self.is_on_gpu);
        let address = self.address(range.start, range.len());
        // SAFETY: `address` checked the range, and nobody but the caller writes there.
        sum.update(unsafe { std::slice::from_raw_parts(address, range.len()) });
    }
}

impl From<Arc<Slot>> for HostTarget {
    fn from(slot: Arc<Slot>) -> Self {
        let address = NonNull::new(slot.address()).expect("a slot lies inside the arena");
        Self { address, len: slot.len(), is_on_gpu: false, owner: Arc::new(Owner(Box::new(slot))) }
    }
}

/// xxh3 of bytes that come in several runs. It equals the xxh3 of all bytes at once.
#[derive(Default)]
pub struct Checksum(xxhash_rust::xxh3::Xxh3);

impl Checksum {
    /// Adds the next run.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all runs so far.
    pub fn value(&self) -> u64 {
        self.0.digest()
    }
}

/// xxh3 of bytes that come at once.
pub fn checksum_of(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

fn assert_on_cpu(is_on_gpu: bool) {
    assert!(!is_on_gpu, "the CPU cannot reach a GPU's memory");
}

fn assert_inside(start: usize, len: usize, whole: usize) {
    assert!(start.checked_add(len).is_some_and(|end| end <= whole), "a range outside the memory");
}

impl fmt::Debug for HostSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HostSource").field("len", &self.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for HostTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HostTarget").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{Checksum, HostSource, HostTarget};
    use crate::memory::arena::Arena;
    use std::sync::Arc;

    #[test]
    fn bytes_survive_in_a_slot() {
        let arena = Arena::new(1 << 20).unwrap();
        let slot = Arc::new(arena.slot(10_000).unwrap());
        HostTarget::from(Arc::clone(&slot)).copy_in(9_990, &[7; 10]);
        let mut out = [0; 10];
        HostSource::from(slot).copy_out(9_990, &mut out);
        assert_eq!(out, [7; 10]);
        assert_eq!(arena.live_bytes(), 0, "a source keeps its slot, and no longer than itself");
    }

    #[test]
    #[should_panic(expected = "a range outside the memory")]
    fn a_range_outside_the_memory_is_refused() {
        let arena = Arena::new(0).unwrap();
        HostSource::from(Arc::new(arena.slot(4096).unwrap())).address(4000, 97);
    }

    #[test]
    fn a_checksum_does_not_depend_on_how_the_bytes_came() {
        let arena = Arena::new(0).unwrap();
        let target = HostTarget::from(Arc::new(arena.slot(3000).unwrap()));
        target.copy_in(0, &(0..3000).map(|index| (index % 251) as u8).collect::<Vec<_>>());
        let (mut whole, mut runs) = (Checksum::default(), Checksum::default());
        target.hash(0..3000, &mut whole);
        for range in [0..1, 1..1, 1..1500, 1500..3000] {
            target.hash(range, &mut runs);
        }
        assert_eq!(whole.value(), runs.value());
    }
}
