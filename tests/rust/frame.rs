//! Memory that tests lend for a read to write into, in a frame of bytes that nobody may touch.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;

use ssdtrain_core::HostTarget;

const PAGE_BYTES: usize = 4096;
const UNTOUCHED: u8 = 0xee;

/// Writable bytes at a chosen distance from the start of a page, and their frame.
#[derive(Debug)]
pub struct Frame {
    block: Box<[UnsafeCell<u8>]>,
    start: usize,
    len: usize,
}

// SAFETY: bytes are looked at only while no read is on its way to them, as `all` asks.
#[expect(unsafe_code, reason = "a store writes into it from another thread")]
unsafe impl Sync for Frame {}

impl Frame {
    /// Room for `len` bytes, `distance` bytes after the start of a page.
    pub fn new(len: usize, distance: usize) -> Arc<Self> {
        let block_len = len + distance + 3 * PAGE_BYTES;
        let block: Box<[_]> = (0..block_len).map(|_| UnsafeCell::new(UNTOUCHED)).collect();
        let start = block.as_ptr().cast::<u8>().align_offset(PAGE_BYTES) + PAGE_BYTES + distance;
        Arc::new(Self { block, start, len })
    }

    /// Lends the bytes for one read.
    #[expect(unsafe_code, reason = "the test lends its own memory")]
    pub fn lend(self: &Arc<Self>) -> HostTarget {
        let address = self.block[self.start].get();
        let address = NonNull::new(address).expect("a slice has an address");
        // SAFETY: the clone keeps the bytes until the store drops the target, and tests look at
        // them only after that.
        unsafe { HostTarget::new(address, self.len, Box::new(Arc::clone(self))) }
    }

    /// Whether a store has the memory.
    pub fn is_lent(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }

    /// The bytes inside the frame, which must be whole. No read may be on its way to them.
    pub fn bytes(self: &Arc<Self>) -> Vec<u8> {
        assert!(!self.is_lent(), "a read is on its way to these bytes");
        let all = self.all();
        let (before, rest) = all.split_at(self.start);
        let (inside, behind) = rest.split_at(self.len);
        let is_whole = before.iter().chain(behind).all(|&byte| byte == UNTOUCHED);
        assert!(is_whole, "a byte around the target was written");
        inside.to_vec()
    }

    #[expect(unsafe_code, reason = "copies bytes that a store wrote")]
    fn all(&self) -> Vec<u8> {
        let first = self.block.as_ptr().cast::<u8>();
        // SAFETY: the whole block is allocated and filled, and no store has it now.
        unsafe { std::slice::from_raw_parts(first, self.block.len()) }.to_vec()
    }
}
