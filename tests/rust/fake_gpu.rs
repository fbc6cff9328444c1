//! A GPU made of software, as tests see it: `tests/fake_device`, preloaded in place of the driver.
//!
//! `SSDTRAIN_FAKE_CUDA` names its library; without it these tests say that they were skipped. Each
//! runs in a process of its own, because the library has to be there before the process begins.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr;

use libloading::os::unix::Library;
use ssdtrain_core::cuda::stream::{DeviceRange, UserStream};

const VARIABLE: &str = "SSDTRAIN_FAKE_CUDA";

/// Runs a test on the fake GPU, in a child process. `test` is its name.
pub fn on_a_fake_gpu(test: &str, body: impl FnOnce(&FakeGpu)) {
    on_preloaded(test, str::to_owned, body);
}

/// The same with a cuFile of the tests' own, which lies beside the driver.
pub fn with_a_fake_cufile(test: &str, body: impl FnOnce(&FakeGpu)) {
    let both = |library: &str| {
        let cufile = Path::new(library).with_file_name("libcufile.so.0");
        format!("{library} {}", cufile.display())
    };
    on_preloaded(test, both, body);
}

fn on_preloaded(test: &str, libraries: fn(&str) -> String, body: impl FnOnce(&FakeGpu)) {
    let Ok(library) = std::env::var(VARIABLE) else {
        eprintln!("{test}: skipped, {VARIABLE} does not name a fake driver");
        return;
    };
    let library = libraries(&library);
    if std::env::var_os("LD_PRELOAD").is_some_and(|preloaded| preloaded == *library) {
        let gpu = FakeGpu::new();
        body(&gpu);
        assert_eq!(gpu.races(), [""; 0], "nothing orders these");
        return;
    }
    let child = Command::new(std::env::current_exe().expect("a test has a path"))
        .args([test, "--exact", "--nocapture"])
        .env("LD_PRELOAD", library)
        // Else the real cuFile leaves a file behind, and the fake one refuses to open.
        .env("CUFILE_LOGFILE_PATH", "/dev/null")
        .output()
        .expect("a test starts itself");
    let report = String::from_utf8_lossy(&child.stderr);
    let told = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{test} on the fake GPU:\n{told}{report}");
    assert!(told.contains("1 passed"), "{test} is not the name of one test:\n{told}");
}

/// Forks this process, and returns what the child answers. It has no other thread, so it may ask
/// only what takes no lock.
#[expect(unsafe_code, reason = "forks, which no library here does")]
pub fn in_a_forked_child(ask: impl FnOnce() -> bool) -> bool {
    unsafe extern "C" {
        fn fork() -> c_int;
        fn waitpid(process: c_int, status: *mut c_int, options: c_int) -> c_int;
        fn _exit(status: c_int) -> !;
    }
    // SAFETY: the child asks, and ends at once.
    let child = unsafe { fork() };
    assert!(child >= 0, "the test cannot fork");
    if child == 0 {
        let answer = c_int::from(ask());
        // SAFETY: it may end a process at any time.
        unsafe { _exit(answer) }
    }
    let mut status = -1;
    // SAFETY: `status` outlives the call.
    let waited = unsafe { waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status & 0x7f), (child, 0), "the child was killed");
    status >> 8 == 1
}

/// The functions of the fake that tests call.
pub struct FakeGpu(Library);

macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        #[expect(non_snake_case, reason = "names of CUDA")]
        #[expect(unsafe_code, reason = "calls the fake driver")]
        impl FakeGpu { $(
            fn $name(&self, $($argument: $type),*) $(-> $result)? {
                type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                // SAFETY: declared as in NVIDIA's cuda.h and in the fake's control.h.
                let found = unsafe { self.0.get::<Function>(stringify!($name).as_bytes()) };
                let function = found.expect("the fake has the functions that tests call");
                // SAFETY: tests pass what the functions above ask for.
                unsafe { function($($argument),*) }
            }
        )* }
    };
}

calls! {
    cuInit(flags: u32) -> c_int;
    cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int;
    cuCtxSetCurrent(context: *mut c_void) -> c_int;
    cuCtxGetCurrent(context: *mut *mut c_void) -> c_int;
    cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int;
    cuMemFree_v2(address: u64) -> c_int;
    cuMemsetD8Async(address: u64, value: u8, len: usize, stream: usize) -> c_int;
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> c_int;
    cuStreamCreate(stream: *mut usize, flags: u32) -> c_int;
    cuStreamSynchronize(stream: usize) -> c_int;
    cuStreamBeginCapture_v2(stream: usize, mode: c_int) -> c_int;
    cuStreamEndCapture(stream: usize, graph: *mut *mut c_void) -> c_int;
    cuCtxSynchronize() -> c_int;
    fake_hold(kind: *const c_char);
    fake_release(kind: *const c_char);
    fake_set_lag(kind: *const c_char, us_max: c_long);
    fake_set_lag_seed(seed: c_long);
    fake_fail(symbol: *const c_char, code: c_int, after: c_long, is_every: c_int);
    fake_recover();
    fake_take_races() -> *mut c_char;
    fake_calls() -> *mut c_char;
    fake_free(text: *mut c_char);
    fake_cufile_fail(symbol: *const c_char, code: c_int, after: c_long, is_every: c_int);
    fake_cufile_recover();
    fake_cufile_calls(symbol: *const c_char) -> c_long;
    fake_cufile_registered() -> c_long;
}

/// What can be held, or made late; as the fake names it.
pub const TO_HOST: &str = "copies to the host";
pub const TO_DEVICE: &str = "copies to the device";

/// When a function that was told to fail does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The call after so many that go well.
    After(i64),
    /// All.
    Always,
}

impl When {
    fn as_numbers(self) -> (i64, c_int) {
        match self {
            Self::After(count) => (count, 0),
            Self::Always => (0, 1),
        }
    }
}

/// What a transfer of the fake cuFile does instead of failing.
pub const MOVES_HALF: i32 = 1;
pub const MOVES_NOTHING: i32 = 2;

impl FakeGpu {
    fn new() -> Self {
        let gpu = Self(Library::this());
        assert_eq!(gpu.cuInit(0), 0);
        gpu.enter_context();
        gpu
    }

    /// Makes the context of the first GPU current in this thread.
    pub fn enter_context(&self) {
        let mut context = ptr::null_mut();
        assert_eq!(self.cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(self.cuCtxSetCurrent(context), 0);
    }

    /// The context that is current in this thread.
    pub fn current_context(&self) -> usize {
        let mut context = ptr::null_mut();
        assert_eq!(self.cuCtxGetCurrent(&raw mut context), 0);
        context as usize
    }

    /// Makes no context current in this thread.
    pub fn leave_context(&self) {
        assert_eq!(self.cuCtxSetCurrent(ptr::null_mut()), 0);
    }

    /// A stream that computes.
    pub fn stream(&self) -> ComputeStream<'_> {
        let mut raw = 0;
        assert_eq!(self.cuStreamCreate(&raw mut raw, 1), 0);
        ComputeStream { gpu: self, raw }
    }

    /// Waits for all that the GPU was given.
    pub fn synchronize(&self) {
        assert_eq!(self.cuCtxSynchronize(), 0);
    }

    pub fn allocate(&self, len: usize) -> DeviceBytes<'_> {
        let mut address = 0;
        assert_eq!(self.cuMemAlloc_v2(&raw mut address, len), 0);
        DeviceBytes { gpu: self, address, len }
    }

    pub fn hold(&self, kind: &str) {
        self.fake_hold(text(kind).as_ptr());
    }

    pub fn release(&self, kind: &str) {
        self.fake_release(text(kind).as_ptr());
    }

    /// Makes each operation of a kind late, by a time of its own up to this.
    pub fn set_lag(&self, kind: &str, us_max: i64, seed: i64) {
        self.fake_set_lag_seed(seed);
        self.fake_set_lag(text(kind).as_ptr(), us_max);
    }

    /// Makes a function fail.
    pub fn fail(&self, symbol: &str, code: i32, when: When) {
        let (after, is_every) = when.as_numbers();
        self.fake_fail(text(symbol).as_ptr(), code, after, is_every);
    }

    /// Forgets all failures.
    pub fn recover(&self) {
        self.fake_recover();
    }

    /// Makes a function of cuFile fail.
    pub fn fail_cufile(&self, symbol: &str, code: i32, when: When) {
        let (after, is_every) = when.as_numbers();
        self.fake_cufile_fail(text(symbol).as_ptr(), code, after, is_every);
    }

    /// Forgets all failures of cuFile.
    pub fn recover_cufile(&self) {
        self.fake_cufile_recover();
    }

    /// How often a function of cuFile was called.
    pub fn cufile_call_count(&self, symbol: &str) -> i64 {
        self.fake_cufile_calls(text(symbol).as_ptr())
    }

    /// How many files and buffers are registered with cuFile.
    pub fn registered_count(&self) -> i64 {
        self.fake_cufile_registered()
    }

    /// The races since the last call.
    pub fn races(&self) -> Vec<String> {
        self.lines(self.fake_take_races())
    }

    /// How often each function was called.
    pub fn call_count(&self, symbol: &str) -> u64 {
        let calls = self.lines(self.fake_calls());
        let line = calls.iter().find_map(|line| line.strip_prefix(symbol)?.strip_prefix(' '));
        line.map_or(0, |count| count.parse().expect("a line ends with a count"))
    }

    #[expect(unsafe_code, reason = "takes a string of the fake")]
    fn lines(&self, text: *mut c_char) -> Vec<String> {
        // SAFETY: the fake returns a string that ends with a zero, and is the caller's.
        let lines = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        self.fake_free(text);
        lines.lines().map(str::to_owned).collect()
    }
}

fn text(name: &str) -> CString {
    CString::new(name).expect("a name has no zero")
}

/// A stream of the test.
pub struct ComputeStream<'a> {
    gpu: &'a FakeGpu,
    raw: usize,
}

impl ComputeStream<'_> {
    #[expect(unsafe_code, reason = "names a stream")]
    pub fn handle(&self) -> UserStream {
        // SAFETY: tests never destroy their streams.
        unsafe { UserStream::new(self.raw) }
    }

    /// Computes something: fills the bytes with a value.
    pub fn fill(&self, bytes: &DeviceBytes<'_>, value: u8) {
        assert_eq!(self.gpu.cuMemsetD8Async(bytes.address, value, bytes.len, self.raw), 0);
    }

    /// Waits for all that was put on the stream, and returns the bytes.
    pub fn read(&self, bytes: &DeviceBytes<'_>) -> Vec<u8> {
        self.synchronize();
        let mut found = vec![0; bytes.len];
        let to = found.as_mut_ptr().cast();
        assert_eq!(self.gpu.cuMemcpyDtoH_v2(to, bytes.address, bytes.len), 0);
        found
    }

    pub fn synchronize(&self) {
        assert_eq!(self.gpu.cuStreamSynchronize(self.raw), 0);
    }

    pub fn begin_capture(&self) {
        assert_eq!(self.gpu.cuStreamBeginCapture_v2(self.raw, 2), 0);
    }

    pub fn end_capture(&self) {
        let mut graph = ptr::null_mut();
        assert_eq!(self.gpu.cuStreamEndCapture(self.raw, &raw mut graph), 0);
    }
}

/// Memory of the fake GPU.
pub struct DeviceBytes<'a> {
    gpu: &'a FakeGpu,
    address: u64,
    len: usize,
}

impl DeviceBytes<'_> {
    #[expect(unsafe_code, reason = "names memory of the GPU")]
    pub fn range(&self) -> DeviceRange {
        // SAFETY: it stays allocated as long as this lives; that tests wait is what they are about.
        unsafe { DeviceRange::new(self.address, self.len) }
    }
}

impl Drop for DeviceBytes<'_> {
    fn drop(&mut self) {
        assert_eq!(self.gpu.cuMemFree_v2(self.address), 0);
    }
}
