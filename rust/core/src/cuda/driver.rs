//! The CUDA driver: opened at run time by its exact name, with every function looked up at once.
//!
//! The types of handles are those of the crate `cudarc`, without its functions. Those panic if the
//! library or a symbol is missing. They try `libcuda.so` first, which may be a stub for linkers.
//! They return an enum: a code that the enum lacks is undefined behaviour, and new drivers bring
//! new codes. Here a code is a plain number.
#![expect(unsafe_code, reason = "looks up and declares foreign functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUstream};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, ErrorKind, Result};

const SONAME: &str = "libcuda.so.1";

/// The codes that a caller treats specially; all others are failures.
pub mod code {
    use std::ffi::c_int;

    /// Success.
    pub const SUCCESS: c_int = 0;
    /// There is a driver, but no GPU.
    pub const NO_DEVICE: c_int = 100;
    /// An event has not been reached yet.
    pub const NOT_READY: c_int = 600;
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions of the driver, each as NVIDIA's header declares it, but for its result.
        #[expect(non_snake_case, missing_docs, reason = "NVIDIA names and documents them")]
        pub struct Functions { $(pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            fn find(library: &Library) -> Result<Self> {
                Ok(Self { $(
                    $name: {
                        // SAFETY: the function is declared above as in NVIDIA's header cuda.h, and
                        // the library is never closed.
                        let found = unsafe { library.get(stringify!($name).as_bytes()) };
                        *found.map_err(|error| missing(stringify!($name), &error))?
                    },
                )* })
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuGetErrorName(c_int, *mut *const c_char);
    cuGetErrorString(c_int, *mut *const c_char);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuPointerGetAttribute(*mut c_void, c_int, CUdeviceptr);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamSynchronize(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuStreamIsCapturing(CUstream, *mut c_int);
    cuThreadExchangeStreamCaptureMode(*mut c_int);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventElapsedTime(*mut f32, CUevent, CUevent);
}

fn missing(name: &str, error: &libloading::Error) -> Error {
    let message = format!(
        "{SONAME} has no function {name} ({error}); update the NVIDIA driver, or keep the tensors \
         on the GPU"
    );
    Error::new(ErrorKind::Unsupported, message)
}

/// The driver of this machine.
pub struct Driver {
    /// Its functions. A result goes to [`check`](Self::check).
    pub functions: Functions,
    _library: Library,
}

impl fmt::Debug for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// Opens the driver, once per process; `Unsupported` if there is none.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        DRIVER.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self> {
        // SAFETY: opening runs the driver's own constructors. A library of that name that is
        // loaded already, as under PyTorch, is returned.
        let opened = unsafe { Library::open(Some(SONAME), RTLD_NOW | RTLD_LOCAL) };
        let library = opened.map_err(|error| {
            let message = format!("there is no NVIDIA driver on this machine: {error}");
            Error::new(ErrorKind::Unsupported, message)
        })?;
        let driver = Self { functions: Functions::find(&library)?, _library: library };
        // SAFETY: the first call, which may be made again by others; no flags are defined.
        let answer = unsafe { (driver.functions.cuInit)(0) };
        if answer == code::NO_DEVICE {
            let message = "the NVIDIA driver finds no GPU that this process may use; see \
                           nvidia-smi and CUDA_VISIBLE_DEVICES";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        driver.check("cuInit", answer)?;
        Ok(driver)
    }

    /// Turns a result into an error that names the function, unless it is a success.
    pub fn check(&self, function: &'static str, answer: c_int) -> Result<()> {
        if answer == code::SUCCESS {
            return Ok(());
        }
        let name = text(self.functions.cuGetErrorName, answer);
        let meaning = text(self.functions.cuGetErrorString, answer);
        let message = format!(
            "{function} of the CUDA driver failed with {answer} ({}): {}. Errors of earlier \
             operations on the GPU are often told by a later call; CUDA_LAUNCH_BLOCKING=1 finds \
             the operation",
            name.as_deref().unwrap_or("a code that it does not name"),
            meaning.as_deref().unwrap_or("no description"),
        );
        Err(Error::new(ErrorKind::Cuda, message))
    }
}

fn text(
    function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    of_code: c_int,
) -> Option<String> {
    let mut text = ptr::null();
    // SAFETY: both functions that come here take any number as a code, and `text` outlives the
    // call.
    let answer = unsafe { function(of_code, &raw mut text) };
    if answer != code::SUCCESS || text.is_null() {
        return None;
    }
    // SAFETY: on success the driver returns a string that is never freed and ends with a zero.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
