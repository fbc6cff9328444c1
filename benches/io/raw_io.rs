//! Raw throughput of the tensor store, without tensors: GB/s by engine, direction, size and depth.
//!
//! Measured is the steady state of training: each step writes over the extents of the step before,
//! and reads into memory that is resident already. Blocks that were never written cost the file
//! system a change of its books for each request, so one pass that nobody times goes first. Sources
//! lie on huge pages, because the kernel pins and maps them page by page; one line per engine shows
//! what small pages cost.
//!
//! `SSDTRAIN_BENCH_DIR` names the directory to measure; without it, it is one in the build folder.
//! A run takes about two minutes, and it says at its end how much it wrote, for the disk wears.

use std::cell::LazyCell;
use std::cmp::Reverse;
use std::env;
use std::fmt;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use rustix::mm::Advice;
use ssdtrain_core::{
    Backend, ErrorKind, HostSource, Pending, Result, StoreConfig, Stored, TensorStore, Tuning,
};
use tempfile::TempDir;

const DIR_VARIABLE: &str = "SSDTRAIN_BENCH_DIR";
const HUGE_PAGE_BYTES: usize = 2 << 20;
const PASS_BYTES: usize = 256 << 20;
/// A pass of small tensors moves less, or it would last longer than all others together.
const TENSORS_PER_PASS_MAX: usize = 512;
const TENSOR_BYTES: [usize; 5] = [64 << 20, 16 << 20, 4 << 20, 1 << 20, 64 << 10];
const DEPTHS: [u32; 3] = [1, 8, 32];
/// What small pages cost is measured with tensors of this size, at the greatest depth.
const COMPARED_TENSOR_BYTES: usize = 16 << 20;
/// A test divides all sizes by this much: it shows that everything runs, not how fast.
const TEST_DIVISOR: usize = 64;

fn main() -> ExitCode {
    let is_test = is_test(env::args());
    let mut criterion = Criterion::default()
        .sample_size(10)
        .nresamples(2_000)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_secs(1))
        .without_plots()
        .configure_from_args();
    let place = match Place::find() {
        Ok(place) => place,
        Err(error) => return refuse(&error),
    };
    let divisor = if is_test { TEST_DIVISOR } else { 1 };
    let huge = Source::new(PASS_BYTES / divisor, Advice::LinuxHugepage);
    let small = Source::new(PASS_BYTES / divisor, Advice::LinuxNoHugepage);
    let mut bench = Bench { divisor, huge, small, rows: Vec::new(), written_bytes: 0 };
    for backend in [Backend::IoUring, Backend::Psync] {
        if let Err(error) = bench.run(&mut criterion, &place.dir, &backend) {
            return refuse(&error);
        }
    }
    criterion.final_summary();
    let table = bench.table();
    // The rates of a test are those of nothing, and a list of names has no rates.
    if !is_test && !bench.rows.is_empty() {
        println!("{}\n\n{table}", bench.conditions(&place.dir));
    }
    ExitCode::SUCCESS
}

/// Criterion keeps to itself whether it measures; this is its rule, from its handling of arguments.
fn is_test(arguments: impl Iterator<Item = String>) -> bool {
    let (mut bench, mut other) = (false, false);
    for argument in arguments {
        bench |= argument == "--bench";
        other |= argument == "--test" || argument == "--list";
    }
    other || !bench
}

fn refuse(error: &dyn fmt::Display) -> ExitCode {
    eprintln!(
        "raw_io measures direct I/O, and that is not possible here: {error}.\nName a directory on \
         a local file system that takes O_DIRECT, such as ext4 or XFS: {DIR_VARIABLE}=/path"
    );
    ExitCode::FAILURE
}

/// The directory that is measured; one of our own goes away with it.
struct Place {
    dir: PathBuf,
    _made: Option<TempDir>,
}

impl Place {
    fn find() -> std::io::Result<Self> {
        if let Some(dir) = env::var_os(DIR_VARIABLE) {
            return Ok(Self { dir: dir.into(), _made: None });
        }
        let made = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        Ok(Self { dir: made.path().to_owned(), _made: Some(made) })
    }
}

/// Memory to write from, which starts on a huge page.
struct Source {
    bytes: Arc<Vec<u8>>,
    start: usize,
}

impl Source {
    fn new(len: usize, advice: Advice) -> Self {
        let mut bytes: Vec<u8> = Vec::with_capacity(len + HUGE_PAGE_BYTES);
        let spare = bytes.spare_capacity_mut();
        let start = spare.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // Before the first touch, since that is when the kernel chooses the pages.
        advise(&mut spare[start..start + len], advice);
        // No two pages are equal: some disks store equal ones once.
        let word = |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bytes.extend((0..start + len).map(|index| (word(index) >> 56) as u8));
        Self { bytes: Arc::new(bytes), start }
    }

    #[expect(unsafe_code, reason = "the benchmark lends its own vectors")]
    fn lend(&self, offset: usize, len: usize) -> HostSource {
        let part = &self.bytes[self.start + offset..][..len];
        let address = NonNull::new(part.as_ptr().cast_mut()).expect("a slice has an address");
        // SAFETY: the vector is never changed, and the clone keeps it until the store drops the
        // source.
        unsafe { HostSource::new(address, len, Box::new(Arc::clone(&self.bytes))) }
    }
}

/// Asks for huge pages behind `memory`, or for none. A plain vector gets small pages on most
/// machines, but huge ones where the administrator said `always`; the advice makes it the same.
#[expect(unsafe_code, reason = "madvise takes a raw address")]
fn advise(memory: &mut [MaybeUninit<u8>], advice: Advice) {
    // SAFETY: the range belongs to the caller, and advice on page sizes changes no content.
    let advised = unsafe { rustix::mm::madvise(memory.as_mut_ptr().cast(), memory.len(), advice) };
    if let Err(errno) = advised {
        eprintln!(
            "the kernel takes no advice on huge pages ({errno}); rates are of its own choice"
        );
    }
}

/// What a row of the table measures, in the table's order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Write,
    WriteFromSmallPages,
    Read,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WriteFromSmallPages => "write from 4 KiB pages",
            Self::Read => "read",
        }
    }
}

/// One store and one kind of request.
struct Case<'a> {
    store: &'a TensorStore,
    what: What,
    tensor_bytes: usize,
    pass_bytes: usize,
    depth: u32,
}

impl Case<'_> {
    /// Writes a pass, all tensors at once, and waits for the last.
    fn write(&self, source: &Source) -> Vec<Stored> {
        let offsets = (0..self.pass_bytes).step_by(self.tensor_bytes);
        let stored: Result<Vec<_>> = offsets
            .map(|offset| self.store.write(source.lend(offset, self.tensor_bytes)))
            .collect();
        let stored = stored.unwrap_or_else(|error| panic!("a write was refused: {error}"));
        for one in &stored {
            one.ticket().wait().unwrap_or_else(|error| panic!("a write failed: {error}"));
        }
        stored
    }

    /// Reads what a pass wrote, all tensors at once, and waits for the last.
    fn read(&self, stored: &[Stored]) -> Vec<Pending> {
        let pending: Result<Vec<_>> = stored.iter().map(|one| self.store.read(one)).collect();
        let pending = pending.unwrap_or_else(|error| panic!("a read was refused: {error}"));
        for one in &pending {
            one.ticket().wait().unwrap_or_else(|error| panic!("a read failed: {error}"));
        }
        pending
    }

    /// Times `pass`, but neither what it needs first nor the release of what it returns. `None` if
    /// a filter left the case out.
    fn measure<Kept>(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        prepare: impl Fn(),
        mut pass: impl FnMut() -> Kept,
    ) -> Option<Row> {
        let mut durations = Vec::new();
        let name = format!("{}/{}", self.what.name(), shown(self.tensor_bytes)).replace(' ', "-");
        group.throughput(Throughput::Bytes(self.pass_bytes as u64));
        group.bench_function(BenchmarkId::new(name, format!("depth-{}", self.depth)), |bencher| {
            prepare();
            bencher.iter_custom(|passes| {
                let mut total = Duration::ZERO;
                for _ in 0..passes {
                    let begin = Instant::now();
                    let kept = pass();
                    let duration = begin.elapsed();
                    drop(kept);
                    durations.push(duration);
                    total += duration;
                }
                total
            });
        });
        durations.sort_unstable();
        let median = durations.get(durations.len() / 2)?;
        Some(Row {
            engine: self.store.stats().unwrap().engines[0].1,
            what: self.what,
            tensor_bytes: self.tensor_bytes,
            depth: self.depth,
            bytes_per_second: self.pass_bytes as f64 / median.as_secs_f64(),
        })
    }
}

struct Row {
    engine: &'static str,
    what: What,
    tensor_bytes: usize,
    depth: u32,
    bytes_per_second: f64,
}

struct Bench {
    divisor: usize,
    huge: Source,
    small: Source,
    rows: Vec<Row>,
    written_bytes: u64,
}

impl Bench {
    /// Measures one engine, or says why it cannot.
    fn run(&mut self, criterion: &mut Criterion, dir: &Path, backend: &Backend) -> Result<()> {
        for depth in DEPTHS {
            let tuning = Tuning { queue_depth: depth, ..Tuning::default() };
            let mut config = StoreConfig::new([dir]).tuned(tuning);
            config.backend = backend.clone();
            // A pass holds all that it reads. Memory that went away between two passes would make
            // this a benchmark of page faults.
            config.arena_retain_bytes = PASS_BYTES;
            let store = match TensorStore::open(&config) {
                Ok(store) => store,
                Err(error)
                    if *backend == Backend::IoUring && error.kind() == ErrorKind::Unsupported =>
                {
                    eprintln!("io_uring is left out: {error}");
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            self.run_store(criterion, &store, depth);
            self.written_bytes += store.stats().unwrap().written.bytes;
        }
        Ok(())
    }

    /// Measures every size in both directions.
    fn run_store(&mut self, criterion: &mut Criterion, store: &TensorStore, depth: u32) {
        let case = |what, tensor_bytes: usize| {
            let tensor_bytes = tensor_bytes / self.divisor;
            let pass_bytes = (PASS_BYTES / self.divisor).min(tensor_bytes * TENSORS_PER_PASS_MAX);
            Case { store, what, tensor_bytes, pass_bytes, depth }
        };
        let mut group = criterion.benchmark_group(store.stats().unwrap().engines[0].1);
        group.sampling_mode(SamplingMode::Flat);
        let mut rows = Vec::new();
        // What comes first moves most, so that it reaches every block that the others use.
        let first = LazyCell::new(|| drop(case(What::Write, TENSOR_BYTES[0]).write(&self.huge)));
        let warm_up = || *LazyCell::force(&first);
        for tensor_bytes in TENSOR_BYTES {
            let write = case(What::Write, tensor_bytes);
            rows.extend(write.measure(&mut group, warm_up, || write.write(&self.huge)));
            let read = case(What::Read, tensor_bytes);
            let stored = LazyCell::new(|| {
                let stored = read.write(&self.huge);
                // The first read also pays for the memory that it lands in.
                drop(read.read(&stored));
                stored
            });
            let save = || {
                LazyCell::force(&stored);
            };
            rows.extend(read.measure(&mut group, save, || read.read(&stored)));
        }
        if depth == DEPTHS[DEPTHS.len() - 1] {
            let write = case(What::WriteFromSmallPages, COMPARED_TENSOR_BYTES);
            rows.extend(write.measure(&mut group, warm_up, || write.write(&self.small)));
        }
        self.rows.append(&mut rows);
    }

    /// Where the rates come from.
    fn conditions(&self, dir: &Path) -> String {
        // `always [madvise] never`: with the last, all pages are small whatever was advised.
        let huge_pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        let huge_pages = huge_pages.as_deref().map_or("not known", str::trim);
        let (dir, written) = (dir.display(), self.written_bytes / 1_000_000_000);
        format!("Directory: {dir}. Huge pages: {huge_pages}. Written: {written} GB.")
    }

    /// The medians in Markdown.
    fn table(&mut self) -> String {
        self.rows.sort_by_key(|row| (row.engine, row.what, Reverse(row.tensor_bytes), row.depth));
        let mut lines = vec![
            "| engine | direction | tensor size | depth | GB/s |".to_owned(),
            "|---|---|--:|--:|--:|".to_owned(),
        ];
        for Row { engine, what, tensor_bytes, depth, bytes_per_second } in &self.rows {
            let (what, size, rate) = (what.name(), shown(*tensor_bytes), bytes_per_second / 1e9);
            lines.push(format!("| {engine} | {what} | {size} | {depth} | {rate:.2} |"));
        }
        lines.join("\n")
    }
}

fn shown(bytes: usize) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}
