//! The arena: one range of huge pages from which the slots of reads are cut.
//!
//! Reads land in a slot, and the slot becomes the tensor: no copy. The arena is one private
//! anonymous mapping on huge pages, because the physical contiguity of the buffer decides the rate
//! of direct I/O, and because a fresh buffer costs more in page faults than the disk takes. It is
//! not marked `MADV_DONTFORK`: a forked worker that touches an inherited tensor must not crash.
#![expect(unsafe_code, reason = "maps memory")]

use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::allocator::ExtentAllocator;
use crate::error::{Error, ErrorKind, Result};

/// Slots start on this boundary, which satisfies direct I/O on every file system.
pub const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// The arena becomes accessible in steps, so that strict overcommit counts only used memory. A step
/// is as large as the window that is read ahead (32 MiB), so most reads need no system call for
/// their memory.
const COMMIT_STEP_BYTES: usize = 32 << 20;

/// One reserved range of addresses from which slots are cut.
pub struct Arena {
    base: NonNull<u8>,
    reserved: usize,
    retain: usize,
    usage: Mutex<Usage>,
    live: AtomicUsize,
    process: u32,
}

struct Usage {
    extents: ExtentAllocator,
    /// Bytes from the base that may be accessed.
    committed: usize,
    /// An estimate of the resident bytes: the most that were in use since pages were last given
    /// back.
    resident: usize,
}

// SAFETY: `base` points to a mapping that lives as long as the arena; all bookkeeping is behind a
// mutex, and bytes are reached only through slots, which never overlap.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves as many addresses as the machine has memory; nothing is resident yet.
    ///
    /// Up to `retain` unused bytes stay resident for the next slots.
    pub fn new(retain: usize) -> Result<Arc<Self>> {
        let mut reserved = physical_bytes().next_multiple_of(HUGE_PAGE_BYTES);
        // An address-space limit (`ulimit -v`) may refuse the first size.
        let base = loop {
            match reserve(reserved) {
                Ok(base) => break base,
                Err(_) if reserved > COMMIT_STEP_BYTES => reserved /= 2,
                Err(source) => {
                    let message = "cannot reserve 32 MiB of addresses for reads; raise `ulimit -v`";
                    return Err(Error::from_io(message, &source.into()));
                }
            }
        };
        let usage = Usage {
            extents: ExtentAllocator::new(PAGE_BYTES as u64, reserved as u64),
            committed: 0,
            resident: 0,
        };
        let (usage, live) = (Mutex::new(usage), AtomicUsize::new(0));
        let process = std::process::id();
        Ok(Arc::new(Self { base, reserved, retain, usage, live, process }))
    }

    /// A slot of `len` bytes. Its content is unspecified.
    pub fn slot(self: &Arc<Self>, len: usize) -> Result<Slot> {
        let mut usage = self.lock();
        let offset = usage.extents.allocate(len as u64).ok_or_else(|| {
            let (live, reserved) = (self.live_bytes(), self.reserved);
            Error::new(
                ErrorKind::NoSpace,
                format!(
                    "no room for a read of {len} bytes: {live} of the arena's {reserved} bytes are \
                     in use; drop tensors that were read before reading more"
                ),
            )
        })? as usize;
        let end = usage.extents.end() as usize;
        if end > usage.committed
            && let Err(error) = self.commit(&mut usage, end)
        {
            usage.extents.free(offset as u64, len as u64);
            return Err(error);
        }
        usage.resident = usage.resident.max(usage.extents.used() as usize);
        drop(usage);
        self.live.fetch_add(round_to_page(len), Ordering::Relaxed);
        Ok(Slot { arena: Arc::clone(self), offset, len })
    }

    /// Bytes of the slots in use.
    pub fn live_bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// Returns true if an address lies in the arena.
    pub fn contains(&self, address: usize) -> bool {
        let base = self.base.as_ptr() as usize;
        (base..base + self.reserved).contains(&address)
    }

    fn lock(&self) -> MutexGuard<'_, Usage> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `[0, end)` accessible, on huge pages where the kernel has them.
    fn commit(&self, usage: &mut Usage, end: usize) -> Result<()> {
        let target = end.next_multiple_of(COMMIT_STEP_BYTES).min(self.reserved);
        let (start, len) = (self.address(usage.committed), target - usage.committed);
        // SAFETY: the range lies in our own reservation and no slot covers it yet.
        unsafe {
            rustix::mm::mprotect(start.cast(), len, MprotectFlags::READ | MprotectFlags::WRITE)
        }
        .map_err(|errno| {
            Error::from_io(
                format_args!("cannot make {len} bytes of memory accessible for reads"),
                &errno.into(),
            )
        })?;
        // A kernel without transparent huge pages refuses; small pages work, only more slowly.
        // SAFETY: advice on our own mapping; it changes no content.
        let _advice = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxHugepage) };
        usage.committed = target;
        Ok(())
    }

    fn address(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.reserved);
        // SAFETY: the offset lies inside (or at the end of) the reservation that starts at `base`.
        unsafe { self.base.as_ptr().add(offset) }
    }

    fn give_back(&self, offset: usize, len: usize) {
        let mut usage = self.lock();
        usage.extents.free(offset as u64, len as u64);
        self.live.fetch_sub(round_to_page(len), Ordering::Relaxed);
        // Seldom, so that memory which goes up and down within a backward is not faulted in again.
        let used = usage.extents.used() as usize;
        if used <= usage.resident / 4 && usage.resident - used > self.retain {
            self.drop_pages(&mut usage);
        }
    }

    /// Gives the pages that no slot covers back to the system, except the first `retain` bytes.
    fn drop_pages(&self, usage: &mut Usage) {
        let mut retain = self.retain;
        for (offset, len) in usage.extents.free_ranges() {
            let kept = retain.min(len as usize);
            retain -= kept;
            let (start, len) = (self.address(offset as usize + kept), len as usize - kept);
            if len > 0 {
                // Refused advice leaves pages resident, which is only a cost in memory.
                // SAFETY: no slot covers a free range, so nobody can look at these pages, and the
                // lock that `usage` comes from keeps it so.
                let _advice =
                    unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxDontNeed) };
            }
        }
        usage.extents.shrink();
        usage.resident = usage.extents.used() as usize + self.retain - retain;
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: every slot holds an `Arc` of the arena, so none is left, and nothing else knows
        // the address.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.reserved) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping cannot fail");
    }
}

fn reserve(len: usize) -> rustix::io::Result<NonNull<u8>> {
    // SAFETY: a new private mapping at an address of the kernel's choice touches nobody's memory.
    let base = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            len,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)
}

fn physical_bytes() -> usize {
    // SAFETY: sysconf only reads a number.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    usize::try_from(pages).unwrap_or(0).max(1 << 16).saturating_mul(rustix::param::page_size())
}

/// The bytes that a slot of `len` bytes takes of the arena.
pub fn round_to_page(len: usize) -> usize {
    len.max(1).next_multiple_of(PAGE_BYTES)
}

/// A range of the arena. It is freed when the last holder drops it, on any thread.
pub struct Slot {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
}

impl Slot {
    /// Address of the first byte; aligned to [`PAGE_BYTES`].
    pub fn address(&self) -> *mut u8 {
        self.arena.address(self.offset)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the slot has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // In a forked process a thread that does not exist may hold the lock, and no read goes into
        // this arena any more.
        if self.arena.process == std::process::id() {
            self.arena.give_back(self.offset, self.len);
        }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Slot")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::{Arena, PAGE_BYTES};

    #[test]
    fn slots_are_aligned_apart_and_come_back() {
        let arena = Arena::new(0).unwrap();
        let slots: Vec<_> = [1, 4096, 5000, 3 << 20].map(|len| arena.slot(len).unwrap()).into();
        for (index, slot) in slots.iter().enumerate() {
            assert_eq!(slot.address() as usize % PAGE_BYTES, 0);
            for other in &slots[index + 1..] {
                assert!(slot.address() as usize + slot.len() <= other.address() as usize);
            }
        }
        let first = slots[0].address();
        drop(slots);
        assert_eq!(arena.live_bytes(), 0);
        assert_eq!(arena.slot(64 << 20).unwrap().address(), first);
    }

    /// Bytes of the arena that are in memory.
    fn resident_bytes(arena: &Arena) -> usize {
        let len = arena.lock().committed;
        let mut pages = vec![0_u8; len / PAGE_BYTES];
        // SAFETY: the range lies in the arena's mapping, and `pages` has a byte for each page.
        let answer = unsafe { libc::mincore(arena.base.as_ptr().cast(), len, pages.as_mut_ptr()) };
        assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
        pages.iter().filter(|&&page| page & 1 == 1).count() * PAGE_BYTES
    }

    #[test]
    fn one_slot_in_use_does_not_hold_the_pages_of_the_others() {
        let (retain, len) = (4 << 20, 1 << 20);
        let arena = Arena::new(retain).unwrap();
        let fill = |seed: u8| {
            let slot = arena.slot(len).unwrap();
            // SAFETY: the slot has `len` bytes, and nobody else knows of it yet.
            unsafe { slot.address().write_bytes(seed, len) };
            slot
        };
        for live_index in [0, 17, 63] {
            let mut slots: Vec<_> = (0..64).map(fill).collect();
            assert!(resident_bytes(&arena) >= 64 * len);
            let live = slots.swap_remove(live_index);
            drop(slots);
            // The pages were kept while many slots were in use, and given back at the last quarter.
            let resident = resident_bytes(&arena);
            assert!(resident <= 64 * len / 4 + retain, "{resident} bytes are resident");
            // SAFETY: the slot is in use and was filled above.
            let bytes = unsafe { std::slice::from_raw_parts(live.address(), len) };
            assert!(bytes.iter().all(|&byte| byte == live_index as u8));
        }
        assert_eq!(arena.live_bytes(), 0);
        assert!(resident_bytes(&arena) <= retain, "what nobody uses is given back");
    }
}
