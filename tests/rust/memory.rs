//! Memory that tests lend to a store.
//!
//! It owns the whole blocks around its bytes, which a write touches, so that a sanitizer sees no
//! byte of others; and it is spoiled when it is dropped, so that a store which lets go too early
//! stores other bytes.

use std::any::Any;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use ssdtrain_core::HostSource;

const PAGE_BYTES: usize = 4096;

/// Bytes that never change, at a chosen distance from the start of a page.
#[derive(Debug)]
pub struct Memory {
    block: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    /// `len` bytes of the pattern of `seed`, `distance` bytes after the start of a page.
    pub fn new(seed: u64, len: usize, distance: usize) -> Arc<Self> {
        let mut block = vec![0x55; len + distance + 3 * PAGE_BYTES];
        let start = block.as_ptr().align_offset(PAGE_BYTES) + PAGE_BYTES + distance;
        fill(seed, &mut block[start..start + len]);
        Arc::new(Self { block, start, len })
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.block[self.start..self.start + self.len]
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.block.fill(0xdd);
        std::hint::black_box(&self.block);
    }
}

impl PartialEq<Memory> for Vec<u8> {
    fn eq(&self, other: &Memory) -> bool {
        self[..] == other[..]
    }
}

/// No two words of a pattern look alike, so that misplaced bytes are other bytes.
fn fill(seed: u64, bytes: &mut [u8]) {
    for (index, word) in bytes.chunks_mut(8).enumerate() {
        let mut mixed = seed.wrapping_mul(0x94d0_49bb_1331_11eb).wrapping_add(index as u64);
        mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.copy_from_slice(&(mixed ^ (mixed >> 32)).to_le_bytes()[..word.len()]);
    }
}

/// Lends `bytes[start..]` to the store.
pub fn lend(bytes: &Arc<Memory>, start: usize) -> HostSource {
    lend_with(bytes, start, ())
}

/// The same, and the store drops `owner` when it lets the bytes go.
#[expect(unsafe_code, reason = "the test lends its own memory")]
pub fn lend_with(bytes: &Arc<Memory>, start: usize, owner: impl Any + Send) -> HostSource {
    let tail = &bytes[start..];
    let address = NonNull::new(tail.as_ptr().cast_mut()).expect("a slice has an address");
    // SAFETY: the bytes never change, and the clone keeps them until the store drops the source.
    unsafe { HostSource::new(address, tail.len(), Box::new((owner, Arc::clone(bytes)))) }
}
