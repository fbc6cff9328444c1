//! Pinned memory, cut into slots: memory of the CPU that a GPU copies from and to by itself, or
//! memory of a GPU that cuFile pins for a drive.
//!
//! It is made once, in few large blocks. Pinning takes long (a second for some GiB), stalls the
//! GPU, and inside a collective operation it can wait for other ranks for ever; so it is done
//! before or between steps. Only a step whose GPU has no room under its bound pins more, if there
//! are no other ranks. The blocks are mapped here and then registered with the driver: memory that
//! the driver allocates itself cannot be registered with `io_uring` on some kernels.
#![expect(unsafe_code, reason = "maps memory and registers it with the CUDA driver")]

use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::allocator::ExtentAllocator;
use crate::cuda::gpu::Gpu;
use crate::cufile::library::Library;
use crate::cufile::ring::Ring;
use crate::error::{Error, ErrorKind, Result, shown_bytes};
use crate::memory::arena::PAGE_BYTES;
use crate::memory::host::{HostSource, HostTarget};

/// Some kernels refuse to pin 2 GiB at once, and `io_uring` takes no buffer above 1 GiB.
const BLOCK_BYTES_MAX: usize = 1 << 30;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every GPU of the process.
const PORTABLE: u32 = 1;

/// Pinned memory of one size, from which slots are cut.
pub struct PinnedPool {
    gpu: Arc<Gpu>,
    blocks: Vec<Block>,
    live: AtomicUsize,
}

struct Block {
    /// For memory of the GPU, an address that the CPU cannot reach.
    base: NonNull<u8>,
    len: usize,
    /// The ring that the block lies in, if it is memory of the GPU.
    ring: Option<Ring>,
    extents: Mutex<ExtentAllocator>,
}

// SAFETY: the bytes are reached only through slots, which never overlap.
unsafe impl Send for Block {}
// SAFETY: as above; the bookkeeping is behind a lock.
unsafe impl Sync for Block {}

impl Block {
    fn new(base: NonNull<u8>, len: usize, ring: Option<Ring>) -> Self {
        let extents = Mutex::new(ExtentAllocator::new(PAGE_BYTES as u64, len as u64));
        Self { base, len, ring, extents }
    }

    fn extents(&self) -> MutexGuard<'_, ExtentAllocator> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PinnedPool {
    /// Pins `nbytes`, in whole pages and in blocks of at most 1 GiB.
    pub fn new(gpu: &Arc<Gpu>, nbytes: usize) -> Result<Arc<Self>> {
        let mut pool = Self::empty(gpu);
        let mut left = nbytes.next_multiple_of(PAGE_BYTES);
        while left > 0 {
            let len = left.min(BLOCK_BYTES_MAX);
            // Added at once, so that the pool frees its blocks if it is dropped with an error.
            pool.add_block(len)?;
            left -= len;
        }
        Ok(Arc::new(pool))
    }

    /// Takes `nbytes` of the GPU's own memory, in whole pages and in one block.
    pub fn on_gpu(gpu: &Arc<Gpu>, library: &'static Library, nbytes: usize) -> Result<Arc<Self>> {
        let ring = Ring::new(gpu, library, nbytes.next_multiple_of(PAGE_BYTES))?;
        let base = ptr::with_exposed_provenance_mut(ring.address() as usize);
        let Some(base) = NonNull::new(base) else {
            return Err(Error::new(ErrorKind::Cuda, "memory of a GPU was allocated at address 0"));
        };
        let mut pool = Self::empty(gpu);
        pool.blocks.push(Block::new(base, ring.len(), Some(ring)));
        Ok(Arc::new(pool))
    }

    fn empty(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), blocks: Vec::new(), live: AtomicUsize::new(0) }
    }

    fn add_block(&mut self, len: usize) -> Result<()> {
        let base = map(len)?;
        let registered = self.gpu.within(|driver| {
            // SAFETY: the range was just mapped, and stays so until it is unregistered.
            let answer = unsafe {
                (driver.functions.cuMemHostRegister_v2)(base.as_ptr().cast(), len, PORTABLE)
            };
            driver.check("cuMemHostRegister_v2", answer)
        });
        if let Err(error) = registered {
            unmap(base, len);
            let size = shown_bytes(len as u64);
            return Err(error.with_note(&format!(
                ". This pins {size} of the CPU's memory for copies; set pinned_bytes or \
                 max_host_bytes lower if the machine has too little"
            )));
        }
        self.blocks.push(Block::new(base, len, None));
        Ok(())
    }

    /// Cuts a slot of at least `len` bytes; `None` if no block has a free range so long now.
    pub fn slot(self: &Arc<Self>, len: usize) -> Option<PinnedSlot> {
        let whole = len.next_multiple_of(PAGE_BYTES);
        let (block, offset) = self.blocks.iter().enumerate().find_map(|(index, block)| {
            block.extents().allocate(whole as u64).map(|offset| (index, offset))
        })?;
        self.live.fetch_add(whole, Ordering::Relaxed);
        Some(PinnedSlot { pool: Arc::clone(self), block, offset, len: whole })
    }

    /// The length of the longest possible slot.
    pub fn slot_bytes_max(&self) -> usize {
        self.blocks.iter().map(|block| block.len).max().unwrap_or(0)
    }

    /// The number of slots of `len` bytes for which it has room if it is empty.
    pub fn slot_count_max(&self, len: usize) -> usize {
        self.blocks.iter().map(|block| block.len / len).sum()
    }

    /// Bytes of the pool.
    pub fn len(&self) -> usize {
        self.blocks.iter().map(|block| block.len).sum()
    }

    /// Returns true if the pool has no bytes.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Bytes of slots in use.
    pub fn live_bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PinnedPool")
            .field("len", &self.len())
            .field("live", &self.live_bytes())
            .finish_non_exhaustive()
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        // In a forked child the blocks are not mapped.
        if self.gpu.is_forked() {
            return;
        }
        for block in self.blocks.iter().filter(|block| block.ring.is_none()) {
            let unregistered = self.gpu.within(|driver| {
                let address: *mut c_void = block.base.as_ptr().cast();
                // SAFETY: the block was registered, and no slot is left that a copy might use.
                let answer = unsafe { (driver.functions.cuMemHostUnregister)(address) };
                driver.check("cuMemHostUnregister", answer)
            });
            // If the driver may still use a block, it stays mapped until the process ends.
            if unregistered.is_ok() {
                unmap(block.base, block.len);
            }
        }
    }
}

fn map(len: usize) -> Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
    let mapped = unsafe {
        rustix::mm::mmap_anonymous(
            ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let size = shown_bytes(len as u64);
    let mapped = mapped.map_err(|errno| {
        let message = format!("cannot map {size} for copies to and from the GPU");
        Error::from_io(message, &errno.into())
    })?;
    let Some(base) = NonNull::new(mapped.cast::<u8>()) else {
        return Err(Error::new(ErrorKind::Io, format!("{size} were mapped at address 0")));
    };
    // A hint; a kernel without huge pages refuses it, which costs time and nothing else.
    // SAFETY: the range was just mapped.
    let _advice = unsafe { rustix::mm::madvise(mapped, len, Advice::LinuxHugepage) };
    // Otherwise a write to a page would move it away from under the GPU while a child shares it.
    // SAFETY: as above.
    let kept = unsafe { rustix::mm::madvise(mapped, len, Advice::LinuxDontFork) };
    kept.map_err(|errno| {
        unmap(base, len);
        Error::from_io("cannot keep pinned memory from forked processes", &errno.into())
    })?;
    Ok(base)
}

fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: the range was mapped by `map`, and nobody uses it any more.
    let unmapped = unsafe { rustix::mm::munmap(base.as_ptr().cast(), len) };
    debug_assert!(unmapped.is_ok(), "munmap refuses only ranges that were never mapped");
}

/// Cuts slots for `len` bytes by `slot`, each but the last of `part_bytes` in whole pages. If there
/// is none so long, further slots have a half, and so on down to `part_bytes_min`. `None` if there
/// is too little room.
pub fn cut(
    len: usize,
    part_bytes: usize,
    part_bytes_min: usize,
    slot: impl Fn(usize) -> Option<PinnedSlot>,
) -> Option<Vec<PinnedSlot>> {
    let (mut slots, mut left, mut part_bytes) = (Vec::new(), len, part_bytes);
    while left > 0 {
        if let Some(slot) = slot(left.min(part_bytes)) {
            left = left.saturating_sub(part_bytes);
            slots.push(slot);
        } else if part_bytes / 2 >= part_bytes_min {
            part_bytes /= 2;
        } else {
            return None;
        }
    }
    Some(slots)
}

/// A range of a pool. Dropping it frees the range: no copy and no I/O may use it then.
#[derive(Debug)]
pub struct PinnedSlot {
    pool: Arc<PinnedPool>,
    block: usize,
    offset: u64,
    len: usize,
}

impl PinnedSlot {
    /// Address of the first byte, at the beginning of a page.
    pub fn address(&self) -> *mut u8 {
        self.block().base.as_ptr().wrapping_add(self.offset as usize)
    }

    /// The address on the GPU, if the slot lies there.
    pub fn gpu_address(&self) -> Option<u64> {
        self.block().ring.as_ref().map(|ring| ring.address() + self.offset)
    }

    fn block(&self) -> &Block {
        &self.pool.blocks[self.block]
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a slot has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` bytes, for a write to the disk. On a GPU they are rounded up to whole pages,
    /// because only whole blocks can go from there.
    ///
    /// # Panics
    /// If the slot is shorter.
    pub fn source(self: &Arc<Self>, len: usize) -> HostSource {
        let len = self.moved_bytes(len);
        let owner = Box::new(Arc::clone(self)); // defence: a slot is free after it is written
        // SAFETY: the range lies in the slot, as `first` asserts, and the slot, which is the
        // owner, keeps its pool mapped.
        let source = unsafe { HostSource::new(self.first(len), len, owner) };
        if self.block().ring.is_some() { source.on_gpu() } else { source }
    }

    /// The first `len` bytes, or whole pages as in `source`, for a read to fill. Nobody else may
    /// use them until the read has ended.
    ///
    /// # Panics
    /// If the slot is shorter.
    pub fn target(self: &Arc<Self>, len: usize) -> HostTarget {
        let (owner, len) = (Box::new(Arc::clone(self)), self.moved_bytes(len));
        // SAFETY: as in `source`; staging gives each slot to one copy or one transfer at a time.
        let target = unsafe { HostTarget::new(self.first(len), len, owner) };
        if self.block().ring.is_some() { target.on_gpu() } else { target }
    }

    fn moved_bytes(&self, len: usize) -> usize {
        if self.block().ring.is_some() { len.next_multiple_of(PAGE_BYTES) } else { len }
    }

    fn first(&self, len: usize) -> NonNull<u8> {
        assert!(len <= self.len, "a range outside the slot");
        NonNull::new(self.address()).expect("a slot lies inside a mapping")
    }
}

impl Drop for PinnedSlot {
    fn drop(&mut self) {
        // In a forked child the lock may be held for ever, and the slot has no memory.
        if self.pool.gpu.is_forked() {
            return;
        }
        self.pool.live.fetch_sub(self.len, Ordering::Relaxed);
        self.pool.blocks[self.block].extents().free(self.offset, self.len as u64);
    }
}
