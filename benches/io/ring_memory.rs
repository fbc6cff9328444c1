//! Memory for the passes of `ring_features.rs`, on pages of a kind.
#![expect(unsafe_code, reason = "advises the kernel on pages")]

use std::mem::MaybeUninit;

use rustix::mm::Advice;

const PAGE_BYTES: usize = 4 << 10;
const HUGE_PAGE_BYTES: usize = 2 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    Huge,
    /// Small ones that a fresh machine hands out in physical order, if one is lucky.
    Small,
    /// Small ones in no physical order, as in a process that has run for a while.
    Scattered,
}

/// Memory that lives as long as the process: no ring can outlive it.
pub struct Memory {
    pub start: usize,
    pub len: usize,
}

impl Memory {
    pub fn new(len: usize, pages: Pages) -> Self {
        let mut bytes: Vec<u8> = Vec::with_capacity(len + HUGE_PAGE_BYTES);
        let spare = bytes.spare_capacity_mut();
        let start = spare.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let memory = &mut spare[start..start + len];
        // Before the first touch, since that is when the kernel chooses the pages.
        let huge = pages == Pages::Huge;
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is our own, and advice on page sizes changes no content.
        let advised = unsafe { rustix::mm::madvise(memory.as_mut_ptr().cast(), len, advice) };
        if let Err(errno) = advised {
            eprintln!("no advice on huge pages ({errno}); pages are of the kernel's choice");
        }
        let page_count = len / PAGE_BYTES;
        // An odd stride visits every page of a power of two once.
        let stride = if pages == Pages::Scattered { 12_345 } else { 1 };
        for page in (0..page_count).map(|index| index * stride % page_count) {
            memory[page * PAGE_BYTES] = MaybeUninit::new(0);
        }
        // No two pages are equal: some disks store equal ones once.
        for (index, byte) in memory.iter_mut().enumerate() {
            byte.write(((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
        }
        let address = memory.as_ptr() as usize;
        // Its length is still zero, so nobody reads what was never filled.
        bytes.leak();
        Self { start: address, len }
    }
}
