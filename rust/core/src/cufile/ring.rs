//! Memory of a GPU that cuFile may use. It is allocated here and registered once.
//!
//! PyTorch's own memory is never registered: each registration costs as much as a transfer, its
//! blocks are aligned to 512 bytes only, and segments that can grow refuse it.
#![expect(unsafe_code, reason = "allocates memory of a GPU and registers it with cuFile")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, PoisonError, RwLock};

use crate::cuda::driver::Driver;
use crate::cuda::gpu::Gpu;
use crate::cufile::library::Library;
use crate::error::{Error, ErrorKind, Result, shown_bytes};
use crate::memory::arena::PAGE_BYTES;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and its answer `CU_MEMORYTYPE_DEVICE`.
const MEMORY_TYPE: c_int = 2;
const DEVICE: c_uint = 2;

/// All rings of the process. Bytes outside of them are not moved.
static RINGS: RwLock<Vec<RingRange>> = RwLock::new(Vec::new());

/// A piece of a GPU's memory, registered with cuFile.
#[derive(Debug)]
pub struct Ring {
    library: &'static Library,
    range: RingRange,
}

/// The GPU and the addresses of a ring.
#[derive(Clone, Debug)]
pub struct RingRange {
    /// The GPU that the memory belongs to.
    pub gpu: Arc<Gpu>,
    /// Its first byte.
    pub address: u64,
    len: usize,
}

impl Ring {
    /// Allocates `len` bytes of a GPU, and registers them.
    pub fn new(gpu: &Arc<Gpu>, library: &'static Library, len: usize) -> Result<Self> {
        let note = |error: Error| {
            let size = shown_bytes(len as u64);
            error.with_note(&format!(
                ". This takes {size} of the GPU's memory for GPUDirect Storage; set pinned_bytes \
                 lower, or gds='disabled'"
            ))
        };
        let address = gpu.within(|driver| allocate(driver, len)).map_err(note)?;
        let range = RingRange { gpu: Arc::clone(gpu), address, len };
        let registered = gpu.within(|driver| {
            range.check(driver)?;
            // SAFETY: the range was just allocated, and stays so until it is deregistered.
            let answer = unsafe { (library.functions.cuFileBufRegister)(range.pointer(), len, 0) };
            library.check("cuFileBufRegister", answer)
        });
        if let Err(error) = registered {
            free(&range);
            return Err(note(error));
        }
        RINGS.write().unwrap_or_else(PoisonError::into_inner).push(range.clone());
        Ok(Self { library, range })
    }

    /// Its first byte, which the CPU cannot reach.
    pub fn address(&self) -> u64 {
        self.range.address
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.range.len
    }

    /// Always false: a ring has at least one page.
    pub fn is_empty(&self) -> bool {
        self.range.len == 0
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let Self { library, range } = self;
        if range.gpu.is_forked() {
            return;
        }
        let mut rings = RINGS.write().unwrap_or_else(PoisonError::into_inner);
        rings.retain(|ring| ring.address != range.address);
        drop(rings);
        let deregistered = range.gpu.within(|_driver| {
            // SAFETY: it was registered, and no transfer uses it any more.
            let answer = unsafe { (library.functions.cuFileBufDeregister)(range.pointer()) };
            library.check("cuFileBufDeregister", answer)
        });
        // If cuFile may still use the memory, it stays until the process ends.
        if deregistered.is_ok() {
            free(range);
        }
    }
}

impl RingRange {
    /// The ring that holds the range; `None` if there is none.
    pub fn around(address: u64, len: usize) -> Option<Self> {
        let rings = RINGS.read().unwrap_or_else(PoisonError::into_inner);
        let end = address.checked_add(len as u64)?;
        let lies_in =
            |ring: &&Self| ring.address <= address && end <= ring.address + ring.len as u64;
        rings.iter().find(lies_in).cloned()
    }

    /// Its first byte as a pointer, for cuFile.
    pub fn pointer(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// Refuses memory that is not a GPU's: cuFile would take its address for an address of the CPU.
    pub fn check(&self, driver: &Driver) -> Result<()> {
        let mut kind: c_uint = 0;
        // SAFETY: `kind` outlives the call and has the type of this attribute.
        let answer = unsafe {
            (driver.functions.cuPointerGetAttribute)(
                (&raw mut kind).cast(),
                MEMORY_TYPE,
                self.address,
            )
        };
        driver.check("cuPointerGetAttribute", answer)?;
        if kind != DEVICE {
            let message = "the ring of GPUDirect Storage is no memory of a GPU any more";
            return Err(Error::new(ErrorKind::Cuda, message));
        }
        Ok(())
    }
}

fn allocate(driver: &Driver, len: usize) -> Result<u64> {
    let mut address = 0;
    // SAFETY: a context is current; `address` outlives the call.
    let answer = unsafe { (driver.functions.cuMemAlloc_v2)(&raw mut address, len) };
    driver.check("cuMemAlloc_v2", answer)?;
    // Large allocations begin at a page of the GPU. Direct I/O needs the start of a page of the
    // CPU.
    if !address.is_multiple_of(PAGE_BYTES as u64) {
        // SAFETY: it was just allocated.
        let answer = unsafe { (driver.functions.cuMemFree_v2)(address) };
        driver.check("cuMemFree_v2", answer)?;
        let message = "the CUDA driver gave memory that does not begin at a page";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    Ok(address)
}

fn free(range: &RingRange) {
    // A driver that ends with the process refuses, and then there is nothing left to free.
    let _gone = range.gpu.within(|driver| {
        // SAFETY: the memory is ours, and nobody uses it any more.
        let answer = unsafe { (driver.functions.cuMemFree_v2)(range.address) };
        driver.check("cuMemFree_v2", answer)
    });
}
