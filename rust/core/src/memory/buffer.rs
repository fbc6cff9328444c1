//! What one request reads into or writes from: slots of our arena, and regions lent by the caller.
#![expect(unsafe_code, reason = "hands out raw addresses to the kernel")]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::memory::arena::{PAGE_BYTES, Slot};

/// Bytes lent by the caller, with whatever keeps them alive.
pub struct HostRegion {
    address: NonNull<u8>,
    len: usize,
    owner: Box<dyn Any + Send>,
}

// SAFETY: the region is only read (by the kernel, or byte by byte below), its owner is `Send`, and
// the promise made to `HostRegion::new` holds on every thread.
unsafe impl Send for HostRegion {}
// SAFETY: as above; there is no interior state.
unsafe impl Sync for HostRegion {}

impl HostRegion {
    /// Lends `len` bytes at `address` for reading.
    ///
    /// # Safety
    /// The pages that hold the bytes must stay mapped and readable until `owner` is dropped. The
    /// bytes may change meanwhile: then what is stored is unspecified bytes, which the caller must
    /// not use.
    pub unsafe fn new(address: NonNull<u8>, len: usize, owner: Box<dyn Any + Send>) -> Self {
        Self { address, len, owner }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// xxh3 of the bytes.
    pub fn checksum(&self) -> u64 {
        // SAFETY: whoever made the region promised that its bytes are readable.
        unsafe { checksum(self.address.as_ptr(), self.len) }
    }

    /// The blocks of `alignment` bytes that the region touches, and where it starts in them. Such a
    /// widening is what spares unaligned tensors a copy.
    ///
    /// # Panics
    /// If `alignment` is more than a page: then the blocks might not be mapped.
    pub fn widened(self, alignment: usize) -> (Self, usize) {
        assert!(alignment <= PAGE_BYTES && alignment.is_power_of_two(), "widened beyond a page");
        let head = self.address.as_ptr() as usize % alignment;
        let start = self.address.as_ptr().wrapping_sub(head);
        let address =
            NonNull::new(start).expect("no byte lies in the first page of the address space");
        let len = (head + self.len).next_multiple_of(alignment);
        (Self { address, len, owner: self.owner }, head)
    }
}

/// What one request reads into or writes from: a part of a slot, or of memory lent by the caller.
pub struct IoBuf {
    memory: Memory,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Memory {
    /// Our own memory, shared with whoever waits for it.
    Slot(Arc<Slot>),
    /// The caller's memory; only ever a source.
    Host(Arc<HostRegion>),
}

impl From<Arc<Slot>> for IoBuf {
    fn from(slot: Arc<Slot>) -> Self {
        let len = slot.len();
        Self { memory: Memory::Slot(slot), start: 0, len }
    }
}

impl From<HostRegion> for IoBuf {
    fn from(region: HostRegion) -> Self {
        let len = region.len;
        Self { memory: Memory::Host(Arc::new(region)), start: 0, len }
    }
}

impl IoBuf {
    /// The part `[start, start + len)`, which keeps the whole memory alive.
    ///
    /// # Panics
    /// If it does not lie inside the buffer.
    #[must_use]
    pub fn part(&self, start: usize, len: usize) -> Self {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "part outside buffer");
        Self { memory: self.memory.clone(), start: self.start + start, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the piece `[start, start + len)`.
    ///
    /// # Panics
    /// If the piece does not lie inside the buffer.
    pub fn piece(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "piece outside buffer");
        let base = match &self.memory {
            Memory::Slot(slot) => slot.address(),
            Memory::Host(region) => region.address.as_ptr(),
        };
        // SAFETY: the assertion above and the one in `part` keep the address inside the memory.
        unsafe { base.add(self.start + start) }
    }

    /// Copies the bytes at `start` to `target`.
    pub fn copy_out(&self, start: usize, target: &mut [u8]) {
        let source = self.piece(start, target.len());
        // SAFETY: `piece` checked the range, and a fresh `&mut` cannot overlap the buffer.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) }
    }

    /// Copies `source` to the bytes at `start`.
    ///
    /// # Panics
    /// If the buffer is lent by the caller: such memory is never written.
    pub fn copy_in(&self, start: usize, source: &[u8]) {
        assert!(matches!(self.memory, Memory::Slot(_)), "a lent buffer is never written");
        let target = self.piece(start, source.len());
        // SAFETY: `piece` checked the range; a slot is written only by the one request that owns
        // it until its ticket is answered.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) }
    }
}

/// xxh3 of `len` bytes at `address`.
///
/// # Safety
/// The bytes must be mapped and readable. If they change meanwhile, the sum is of no use.
unsafe fn checksum(address: *const u8, len: usize) -> u64 {
    // SAFETY: the caller promises that the range is readable.
    let bytes = unsafe { std::slice::from_raw_parts(address, len) };
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// xxh3 of `[start, start + len)` of a slot whose read has ended.
pub fn slot_checksum(slot: &Arc<Slot>, start: usize, len: usize) -> u64 {
    let address = IoBuf::from(Arc::clone(slot)).piece(start, len);
    // SAFETY: `piece` checked the range, which the slot keeps mapped.
    unsafe { checksum(address, len) }
}

#[cfg(test)]
mod tests {
    use super::IoBuf;
    use crate::memory::arena::Arena;
    use std::sync::Arc;

    #[test]
    fn bytes_survive_in_a_slot() {
        let arena = Arena::new(1 << 20).unwrap();
        let buffer = IoBuf::from(Arc::new(arena.slot(10_000).unwrap()));
        buffer.copy_in(9_990, &[7; 10]);
        let mut out = [0; 10];
        buffer.copy_out(9_990, &mut out);
        assert_eq!(out, [7; 10]);
    }

    #[test]
    #[should_panic(expected = "piece outside buffer")]
    fn a_piece_outside_the_buffer_is_refused() {
        let arena = Arena::new(0).unwrap();
        IoBuf::from(Arc::new(arena.slot(4096).unwrap())).piece(4000, 97);
    }
}
