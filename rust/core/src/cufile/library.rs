//! `libcufile`: opened at run time by its exact name, with every function looked up at once.
//!
//! A code is a plain number: new versions bring new codes, and an enum that lacks a code would be
//! undefined behaviour.
#![expect(unsafe_code, reason = "looks up and declares foreign functions")]

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Loaded, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, ErrorKind, Result};

/// The only name that NVIDIA's packages for Python have.
const SONAME: &str = "libcufile.so.0";
/// `CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE`.
const ALLOW_COMPAT_MODE: c_int = 1;
/// Codes of cuFile begin here; smaller codes are the kernel's.
pub const CODE_MIN: c_int = 5001;
const DRIVER_ALREADY_OPEN: Code = Code(5026);
const CUDA_DRIVER_ERROR: Code = Code(5011);

/// `CUfileOpError`: 0, or a number from 5001 on.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

/// `CUfileError_t`: the result of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Status {
    code: Code,
    /// `CUresult`, if the code says that CUDA failed.
    cuda: c_int,
}

/// `CUfileHandle_t`.
pub type RawHandle = *mut c_void;

/// `CUfileDescr_t` of a descriptor of Linux.
#[repr(C)]
pub struct Description {
    kind: c_int,
    /// The header has a union of a descriptor and a pointer here.
    fd: FdOrPointer,
    operations: *const c_void,
}

#[repr(C)]
union FdOrPointer {
    fd: c_int,
    _pointer: *mut c_void,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Properties {
    major: c_uint,
    minor: c_uint,
    poll_threshold: usize,
    direct_io_max: usize,
    status_flags: c_uint,
    control_flags: c_uint,
    feature_flags: c_uint,
    device_cache: c_uint,
    buffer_cache: c_uint,
    pinned_memory_max: c_uint,
    batch_max: c_uint,
    batch_timeout_ms: c_uint,
}

const _: () = {
    assert!(size_of::<Code>() == 4);
    assert!(size_of::<Status>() == 8);
    assert!(size_of::<Description>() == 24);
    assert!(size_of::<Properties>() == 56);
    assert!(size_of::<libc::off_t>() == 8);
};

impl Description {
    /// Describes a file by its descriptor.
    pub fn of(fd: c_int) -> Self {
        /// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
        const OPAQUE_FD: c_int = 1;
        // The other half of the union is zero, as after the `memset` of NVIDIA's examples.
        let mut described = FdOrPointer { _pointer: std::ptr::null_mut() };
        described.fd = fd;
        Self { kind: OPAQUE_FD, fd: described, operations: std::ptr::null() }
    }
}

macro_rules! functions {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of the library, each as NVIDIA's header `cufile.h` declares it.
        #[expect(non_snake_case, missing_docs, reason = "NVIDIA names and documents them")]
        pub struct Functions { $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        impl Functions {
            fn find(library: &Loaded) -> Result<Self> {
                Ok(Self { $(
                    $name: {
                        // SAFETY: the function is declared above as in NVIDIA's header cufile.h,
                        // and the library is never closed.
                        let found = unsafe { library.get(stringify!($name).as_bytes()) };
                        *found.map_err(|error| missing(stringify!($name), &error))?
                    },
                )* })
            }
        }
    };
}

functions! {
    cuFileDriverOpen() -> Status;
    cuFileDriverGetProperties(*mut c_void) -> Status;
    cuFileSetParameterBool(c_int, bool) -> Status;
    cuFileGetVersion(*mut c_int) -> Status;
    cuFileHandleRegister(*mut RawHandle, *mut Description) -> Status;
    cuFileHandleDeregister(RawHandle);
    cuFileBufRegister(*const c_void, usize, c_int) -> Status;
    cuFileBufDeregister(*const c_void) -> Status;
    cuFileRead(RawHandle, *mut c_void, usize, libc::off_t, libc::off_t) -> isize;
    cuFileWrite(RawHandle, *const c_void, usize, libc::off_t, libc::off_t) -> isize;
}

fn missing(name: &str, error: &libloading::Error) -> Error {
    let message = format!(
        "{SONAME} has no function {name} ({error}); install a newer nvidia-cufile, or set \
         gds='disabled'"
    );
    Error::new(ErrorKind::Unsupported, message)
}

/// The meaning of a code of cuFile, in short.
pub fn meaning(code: c_int) -> &'static str {
    match code {
        5001 => "nvidia-fs is not loaded and compatibility mode is off",
        5002 | 5003 => "a property is out of range",
        5004 | 5005 => "the versions of nvidia-fs and libcufile differ",
        5006 => "the library is being closed",
        5007 => "this platform has no GPUDirect Storage",
        5008 => "this file system or drive has no GPUDirect Storage",
        5009 => "this GPU has no GPUDirect Storage",
        5010 | 5033 | 5048 => "nvidia-fs failed",
        5011 => "the CUDA driver failed",
        5012..=5014 => "the address is no memory of a GPU",
        5015 | 5047 => "another CUDA context is current",
        5016 | 5017 | 5036 => "the GPU cannot pin so much memory",
        5018..=5020 => "the file cannot be used with it",
        5022 => "an argument is wrong",
        5023 | 5028 => "it is registered already",
        5024 | 5027 => "it is not registered, or nothing is known of its drive (see /run/udev)",
        5025 => "permission denied",
        5031 => "the file could not be opened a second time",
        5034 => "its configuration switches it off for this file",
        5043 => "it is out of memory",
        5044 => "the drive failed",
        _ => "see CUfileOpError in NVIDIA's cufile.h",
    }
}

/// The library of this process.
pub struct Library {
    /// Its functions. A status goes to [`check`](Self::check).
    pub functions: Functions,
    is_open: Mutex<bool>,
    _loaded: Loaded,
}

impl fmt::Debug for Library {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Library").finish_non_exhaustive()
    }
}

impl PartialEq for Library {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Library {
    /// The library: the loaded library (PyTorch loads it), else the file at `path`, else the
    /// system's. It stays as long as the process; `Unsupported` if there is none.
    pub fn find(path: Option<&Path>) -> Result<&'static Self> {
        static FOUND: Mutex<Option<&'static Library>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *found {
            return Ok(library);
        }
        let loaded = load(path)?;
        let library = Box::leak(Box::new(Self {
            functions: Functions::find(&loaded)?,
            is_open: Mutex::new(false),
            _loaded: loaded,
        }));
        *found = Some(library);
        Ok(library)
    }

    /// Opens cuFile's driver, once per process. `allows_compat` permits *compatibility mode*, which
    /// copies through the CPU and is no GPUDirect Storage.
    ///
    /// If `/proc/modules` is missing, some versions never return from this. Call it first in a
    /// process that can be ended (see `trial.rs`).
    pub fn open_driver(&self, allows_compat: bool) -> Result<()> {
        let mut is_open = self.is_open.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_open {
            return Ok(());
        }
        // SAFETY: a number of the header's enum and a flag; the library keeps nothing of them.
        let set =
            unsafe { (self.functions.cuFileSetParameterBool)(ALLOW_COMPAT_MODE, allows_compat) };
        // If another user opened the driver before, that user chose the mode.
        if set.code != DRIVER_ALREADY_OPEN {
            self.check("cuFileSetParameterBool", set)?;
        }
        // SAFETY: no arguments.
        let opened = unsafe { (self.functions.cuFileDriverOpen)() };
        if opened.code != DRIVER_ALREADY_OPEN {
            self.check("cuFileDriverOpen", opened)?;
        }
        *is_open = true;
        Ok(())
    }

    /// The version, as NVIDIA counts (1170 is 1.17), and the flag for compatibility mode.
    pub fn facts(&self) -> Result<Facts> {
        let mut version = 0;
        // SAFETY: `version` outlives the call.
        let answer = unsafe { (self.functions.cuFileGetVersion)(&raw mut version) };
        self.check("cuFileGetVersion", answer)?;
        // The structure has grown before, so there is room for a longer structure.
        let mut room = [Properties::default(); 4];
        // SAFETY: `room` outlives the call, and begins with the structure of the header.
        let answer =
            unsafe { (self.functions.cuFileDriverGetProperties)(room.as_mut_ptr().cast()) };
        self.check("cuFileDriverGetProperties", answer)?;
        let allows_compat = room[0].control_flags & (1 << ALLOW_COMPAT_MODE) != 0;
        Ok(Facts { version, allows_compat })
    }

    /// Turns a status into an error that names the function, unless it is a success.
    pub fn check(&self, function: &str, status: Status) -> Result<()> {
        let Code(code) = status.code;
        if code == 0 {
            return Ok(());
        }
        let mut message = format!("{function} of libcufile failed with {code}: {}", meaning(code));
        if status.code == CUDA_DRIVER_ERROR {
            message = format!("{message} (CUDA error {})", status.cuda);
        }
        Err(Error::new(ErrorKind::Unsupported, message))
    }
}

/// The version and the mode of an open library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// 1170 is 1.17.
    pub version: c_int,
    /// True if compatibility mode is permitted.
    pub allows_compat: bool,
}

fn load(path: Option<&Path>) -> Result<Loaded> {
    let name = Path::new(SONAME);
    let ways = [
        (Some(name), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NOLOAD),
        (path, RTLD_NOW | RTLD_LOCAL),
        (Some(name), RTLD_NOW | RTLD_LOCAL),
    ];
    let mut last = None;
    for (name, flags) in ways {
        let Some(name) = name else { continue };
        // SAFETY: opening runs the library's own constructors; it is never closed.
        match unsafe { Loaded::open(Some(name), flags) } {
            Ok(loaded) => return Ok(loaded),
            Err(error) => last = Some(error),
        }
    }
    let reason = last.map_or_else(String::new, |error| error.to_string());
    let message = format!(
        "GPUDirect Storage needs {SONAME}, which is not on this machine ({reason}); `pip install \
         nvidia-cufile`, or set gds='disabled'"
    );
    Err(Error::new(ErrorKind::Unsupported, message))
}
