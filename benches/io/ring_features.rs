//! What each feature of `io_uring` and each state of file and memory is worth for this kind of I/O.
//!
//! The ring is driven without the store, on an unnamed `O_DIRECT` file. Every case is measured next
//! to its baseline, in turns that change from round to round, and what is printed is the median of
//! the ratios of such pairs: a neighbour that slows the machine slows both. A case that the kernel
//! or the device refuses says so. `docs/internals/storage.md` draws the conclusions.
//!
//! `SSDTRAIN_BENCH_DIR` names the directory to measure; without it, it is one in the build folder.
//! `SSDTRAIN_BENCH_SECONDS` bounds the rounds (150). A word after `--` keeps the sections and
//! requests that contain it. The output is Markdown; it says how much was written, for the disk
//! wears.

mod ring_memory;
mod ring_pass;

use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use tempfile::TempDir;

use ring_memory::{Memory, Pages};
use ring_pass::{
    Blocks, Case, DEFER, DEFER_APART, Direction, KIB, Layout, MIB, Outcome, PLAIN, Rules, Setup,
    TENSOR_BYTES, Wait, pass, process_cpu_s,
};

const DIR_VARIABLE: &str = "SSDTRAIN_BENCH_DIR";
const SECONDS_VARIABLE: &str = "SSDTRAIN_BENCH_SECONDS";
const SECONDS_DEFAULT: u64 = 150;
const MEMORY_BYTES: usize = 256 * MIB;
const TEST_MEMORY_BYTES: usize = 32 * MIB;
const JOINED_BYTES: usize = 4 * MIB;
/// `fallocate` that leaves written blocks (Linux 6.17).
const WRITE_ZEROES: u32 = 0x80;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let has = |word: &str| arguments.iter().any(|argument| argument == word);
    let is_test = has("--test") || !has("--bench");
    let filter = arguments.iter().find(|argument| !argument.starts_with("--"));
    match Bench::prepare(is_test).and_then(|bench| bench.run(filter.map(String::as_str))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "ring_features cannot measure: {error}.\nIt needs io_uring (see `sysctl \
                 kernel.io_uring_disabled`) and a directory on a local file system that takes \
                 O_DIRECT, with 2 GiB free: {DIR_VARIABLE}=/path"
            );
            ExitCode::FAILURE
        }
    }
}

impl Case {
    fn new(name: &'static str, direction: Direction, request_bytes: usize, depth: usize) -> Self {
        let (rules, layout, pages, blocks) = (PLAIN, Layout::Ranges, Pages::Huge, Blocks::Written);
        Self { name, direction, request_bytes, depth, rules, layout, pages, blocks }
    }

    fn ruled(&self, name: &'static str, rules: Rules) -> Self {
        Self { name, rules, ..self.clone() }
    }

    fn laid(&self, name: &'static str, layout: Layout, pages: Pages) -> Self {
        let joined = matches!(layout, Layout::Vectored | Layout::Copied);
        let (request_bytes, depth) = if joined { (JOINED_BYTES, 16) } else { (TENSOR_BYTES, 32) };
        Self { name, request_bytes, depth, layout, pages, ..self.clone() }
    }

    /// `write 4 MiB x 16`.
    fn request(&self) -> String {
        let direction = if self.direction == Direction::Write { "write" } else { "read" };
        format!("{direction} {} x {}", shown(self.request_bytes), self.depth)
    }

    /// Its name, with its size and depth where they are not those of the baseline.
    fn title(&self, base: &Self) -> String {
        if (self.request_bytes, self.depth) == (base.request_bytes, base.depth) {
            return self.name.to_owned();
        }
        format!("{}: {} x {}", self.name, shown(self.request_bytes), self.depth)
    }
}

/// A baseline and what is compared with it.
struct Group {
    section: &'static str,
    base: Case,
    others: Vec<Case>,
}

fn groups() -> Vec<Group> {
    let shapes = [(64 * KIB, 32), (MIB, 32), (4 * MIB, 16)];
    let directions = [Direction::Write, Direction::Read];
    let bases = || {
        directions.into_iter().flat_map(move |direction| {
            shapes.map(|(bytes, depth)| Case::new("plain ring", direction, bytes, depth))
        })
    };
    let mut all: Vec<Group> = bases().map(ring_features).collect();
    all.extend(bases().map(|base| pages(base.ruled("huge pages", DEFER))));
    all.extend(directions.map(piece_sizes));
    all.extend(shapes.map(|(bytes, depth)| blocks(bytes, depth)));
    all.extend(small_tensors());
    all
}

fn ring_features(base: Case) -> Group {
    let others = [
        ("COOP_TASKRUN", Rules { setup: Setup::Coop, ..PLAIN }),
        ("SINGLE_ISSUER + DEFER_TASKRUN", DEFER),
        ("registered file", Rules { registered_file: true, ..PLAIN }),
        ("registered buffers", Rules { registered_buffers: true, ..PLAIN }),
        ("registered ring descriptor", Rules { registered_ring: true, ..PLAIN }),
        ("SQPOLL", Rules { setup: Setup::Sqpoll, ..PLAIN }),
        ("IOPOLL", Rules { setup: Setup::Iopoll, ..PLAIN }),
        ("NO_IOWAIT", Rules { no_iowait: true, ..PLAIN }),
        ("wait for depth/4", Rules { wait: Wait::Quarter, ..PLAIN }),
        ("DEFER, wait for depth/4", Rules { wait: Wait::Quarter, ..DEFER }),
        (
            "DEFER, wait for depth/4, min_wait 500 us",
            Rules { wait: Wait::QuarterAtMost(500), ..DEFER },
        ),
        (
            "DEFER, wait for depth/4, NO_IOWAIT",
            Rules { wait: Wait::Quarter, no_iowait: true, ..DEFER },
        ),
        (
            "DEFER, file, buffers and ring registered",
            Rules {
                registered_file: true,
                registered_buffers: true,
                registered_ring: true,
                ..DEFER
            },
        ),
        ("two rings on two threads", Rules { ring_count: 2, ..PLAIN }),
    ];
    let others = others.map(|(name, rules)| base.ruled(name, rules)).into();
    Group { section: "Features of the ring", base, others }
}

fn pages(base: Case) -> Group {
    let small = Case { name: "4 KiB pages in order", pages: Pages::Small, ..base.clone() };
    let scattered = Case { name: "4 KiB pages scattered", pages: Pages::Scattered, ..base.clone() };
    Group { section: "Pages of the buffer", base, others: vec![small, scattered] }
}

fn piece_sizes(direction: Direction) -> Group {
    let case = |bytes: usize, depth: usize| {
        Case::new("pieces", direction, bytes, depth).ruled("pieces", DEFER)
    };
    let sizes = [(256 * KIB, 32), (512 * KIB, 32), (MIB, 32), (2 * MIB, 32)];
    let larger = [(4 * MIB, 8), (4 * MIB, 32), (8 * MIB, 8), (16 * MIB, 4)];
    let others = sizes.into_iter().chain(larger).map(|(bytes, depth)| case(bytes, depth)).collect();
    Group { section: "Size of pieces", base: case(4 * MIB, 16), others }
}

fn blocks(bytes: usize, depth: usize) -> Group {
    let written = Case::new("overwrite of written blocks", Direction::Write, bytes, depth);
    let base = written.ruled(written.name, DEFER_APART);
    let others = [
        ("first pass over fallocated blocks", Blocks::Allocated),
        ("second pass over them", Blocks::AllocatedSecondPass),
        ("file that grows", Blocks::Missing),
        ("second pass over it", Blocks::MissingSecondPass),
        ("first pass after fallocate with WRITE_ZEROES", Blocks::WrittenZeroes),
    ];
    let others = others.map(|(name, blocks)| Case { name, blocks, ..base.clone() }).into();
    Group { section: "Blocks of the file", base, others }
}

fn small_tensors() -> [Group; 3] {
    let (write, read) = (Direction::Write, Direction::Read);
    let case = |name, direction, layout, pages| {
        Case::new(name, direction, 0, 0).ruled(name, DEFER).laid(name, layout, pages)
    };
    let section = "Tensors of 64 KiB";
    let from_small = |name, layout| case(name, write, layout, Pages::Scattered);
    let from_huge = |name, layout| case(name, write, layout, Pages::Huge);
    let into_huge = |name, layout| case(name, read, layout, Pages::Huge);
    let one_read = Case::new("one read, tensors are its parts", read, JOINED_BYTES, 16);
    let singly = Group {
        section,
        base: from_small("each alone, 4 KiB pages", Layout::Apart),
        others: vec![
            from_small("writev of 64, 4 KiB pages", Layout::Vectored),
            from_small("64 copied to huge pages, one write", Layout::Copied),
            from_huge("each alone, huge pages", Layout::Apart),
            from_huge("writev of 64, huge pages", Layout::Vectored),
            from_huge("64 copied from huge pages, one write", Layout::Copied),
        ],
    };
    let joined = Group {
        section,
        base: from_small("writev of 64, 4 KiB pages", Layout::Vectored),
        others: vec![from_small("64 copied to huge pages, one write", Layout::Copied)],
    };
    let back = Group {
        section,
        base: into_huge("each alone, huge pages", Layout::Apart),
        others: vec![
            into_huge("readv of 64, huge pages", Layout::Vectored),
            into_huge("one read, 64 copied out", Layout::Copied),
            one_read.ruled(one_read.name, DEFER),
        ],
    };
    [singly, joined, back]
}

/// Pairs of a case and its baseline, or why there are none.
#[derive(Default)]
struct Samples {
    pairs: Vec<(Outcome, Outcome)>,
    refused: Option<io::Error>,
}

struct Bench {
    is_test: bool,
    dir: PathBuf,
    _made: Option<TempDir>,
    file: File,
    huge: Memory,
    small: Memory,
    scattered: Memory,
    staging: Memory,
    written_bytes: u64,
}

impl Bench {
    fn prepare(is_test: bool) -> io::Result<Self> {
        let (dir, made) = if let Some(dir) = env::var_os(DIR_VARIABLE) {
            (PathBuf::from(dir), None)
        } else {
            let made = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
            (made.path().to_owned(), Some(made))
        };
        let len = if is_test { TEST_MEMORY_BYTES } else { MEMORY_BYTES };
        let file = unnamed(&dir)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, len as u64)?;
        let mut bench = Self {
            is_test,
            dir,
            _made: made,
            file,
            huge: Memory::new(len, Pages::Huge),
            small: Memory::new(len, Pages::Small),
            scattered: Memory::new(len, Pages::Scattered),
            staging: Memory::new(JOINED_BYTES * 16, Pages::Huge),
            written_bytes: 0,
        };
        // Every block is written before anything is timed, and the second pass sees it so.
        let filling = Case::new("fill", Direction::Write, MIB, 16);
        for _ in 0..2 {
            pass(&filling, &bench.file, &bench.huge, &bench.staging, len)?;
            bench.written_bytes += len as u64;
        }
        Ok(bench)
    }

    fn run(mut self, filter: Option<&str>) -> io::Result<()> {
        let kept = |group: &Group| {
            filter.is_none_or(|word| {
                group.section.contains(word) || group.base.request().contains(word)
            })
        };
        let groups: Vec<Group> = groups().into_iter().filter(kept).collect();
        let mut samples: Vec<Vec<Samples>> = groups
            .iter()
            .map(|group| group.others.iter().map(|_| Samples::default()).collect())
            .collect();
        let seconds = env::var(SECONDS_VARIABLE).ok().and_then(|text| text.parse().ok());
        let limit = Duration::from_secs(seconds.unwrap_or(SECONDS_DEFAULT));
        let (begin, busy_begin, cpu_begin) = (Instant::now(), machine_cpu_s(), process_cpu_s());
        let (mut round_count, mut longest) = (0, Duration::ZERO);
        while round_count == 0 || (!self.is_test && begin.elapsed() + longest < limit) {
            let round_begin = Instant::now();
            for (group, samples) in groups.iter().zip(&mut samples) {
                self.round(group, samples, round_count)?;
            }
            longest = longest.max(round_begin.elapsed());
            round_count += 1;
        }
        // The rates of a test are those of nothing.
        if !self.is_test {
            let own = process_cpu_s() - cpu_begin;
            let others = (machine_cpu_s() - busy_begin - own) / begin.elapsed().as_secs_f64();
            println!("{}", self.conditions(round_count, begin.elapsed(), others));
            print_tables(&groups, &samples);
        }
        Ok(())
    }

    /// One pair for each case; who goes first changes from round to round.
    fn round(&mut self, group: &Group, samples: &mut [Samples], number: usize) -> io::Result<()> {
        for (index, (case, samples)) in group.others.iter().zip(samples).enumerate() {
            if samples.refused.is_some() {
                continue;
            }
            let pair = if (number + index).is_multiple_of(2) {
                self.measure(&group.base).map(|base| (base, self.measure(case)))
            } else {
                let other = self.measure(case);
                self.measure(&group.base).map(|base| (base, other))
            };
            match pair? {
                (base, Ok(other)) => samples.pairs.push((base, other)),
                (_, Err(error)) => samples.refused = Some(error),
            }
        }
        Ok(())
    }

    fn measure(&mut self, case: &Case) -> io::Result<Outcome> {
        let pass_bytes = if self.is_test {
            (case.request_bytes * 2).max(8 * MIB)
        } else if case.request_bytes > MIB && case.layout == Layout::Ranges {
            MEMORY_BYTES
        } else {
            MEMORY_BYTES / 2
        };
        let len = pass_bytes as u64;
        let begin = Instant::now();
        let made = match case.blocks {
            Blocks::Written => None,
            Blocks::Missing | Blocks::MissingSecondPass => Some(unnamed(&self.dir)?),
            Blocks::Allocated | Blocks::AllocatedSecondPass | Blocks::WrittenZeroes => {
                let file = unnamed(&self.dir)?;
                let zeroes = case.blocks == Blocks::WrittenZeroes;
                let mode = if zeroes { WRITE_ZEROES } else { 0 };
                let mode = FallocateFlags::from_bits_retain(mode);
                rustix::fs::fallocate(&file, mode, 0, len)?;
                if zeroes {
                    self.written_bytes += len;
                }
                Some(file)
            }
        };
        let prepared = if made.is_some() { begin.elapsed() } else { Duration::ZERO };
        let file = made.as_ref().unwrap_or(&self.file);
        let memory = match case.pages {
            Pages::Huge => &self.huge,
            Pages::Small => &self.small,
            Pages::Scattered => &self.scattered,
        };
        if matches!(case.blocks, Blocks::AllocatedSecondPass | Blocks::MissingSecondPass) {
            pass(case, file, memory, &self.staging, pass_bytes)?;
            self.written_bytes += len;
        }
        let mut outcome = pass(case, file, memory, &self.staging, pass_bytes)?;
        outcome.prepare_s += prepared.as_secs_f64();
        if case.direction == Direction::Write {
            self.written_bytes += len;
        }
        Ok(outcome)
    }

    fn conditions(&self, round_count: usize, elapsed: Duration, others: f64) -> String {
        let first = |path: &str, key: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(key)).unwrap_or("not known");
            let value = line.trim_start_matches(key).replace(':', " ");
            value.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        format!(
            "# What io_uring's features and the states of file and memory are worth\n\n\
             `cargo bench --bench ring_features`, {round_count} rounds in {:.0} s; {:.1} GB \
             written to {}.\n\n{}, {cores} cores, Linux {}. Direct I/O is aligned to {}. \
             Huge pages: {}; on them were {} of the {} kB that should be. Locked memory \
             (soft, hard): {}. Cores busy with other processes: {others:.2}.\n\n\
             Ratios are medians over pairs with the first \
             row of each table, the quartiles in parentheses. CPU is that of the whole process, \
             kernel threads of its rings included.",
            elapsed.as_secs_f64(),
            self.written_bytes as f64 / 1e9,
            file_system(&self.dir),
            first("/proc/cpuinfo", "model name"),
            first("/proc/sys/kernel/osrelease", ""),
            alignment(&self.file),
            first("/sys/kernel/mm/transparent_hugepage/enabled", ""),
            first("/proc/self/smaps_rollup", "AnonHugePages"),
            (self.huge.len + self.staging.len) / KIB,
            first("/proc/self/limits", "Max locked memory"),
        )
    }
}

fn unnamed(dir: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT | OFlags::TMPFILE;
    Ok(File::from(rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?))
}

/// Memory and file alignment, as `statx(STATX_DIOALIGN)` says.
fn alignment(file: &File) -> String {
    let wanted = rustix::fs::StatxFlags::from_bits_retain(0x2000);
    match rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, wanted) {
        Ok(facts) if facts.stx_dio_offset_align > 0 => {
            let (memory, offset) = (facts.stx_dio_mem_align, facts.stx_dio_offset_align);
            format!("{memory} bytes of memory and {offset} of the file")
        }
        _ => "what statx does not say".to_owned(),
    }
}

/// Type and device of the file system below `dir`.
fn file_system(dir: &Path) -> String {
    let dir = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .filter(|fields| fields.len() > 2 && dir.starts_with(fields[1]))
        .max_by_key(|fields| fields[1].len())
        .map_or("a file system that is not known".to_owned(), |fields| {
            format!("{} on {}", fields[2], fields[0])
        })
}

/// Seconds that all cores were busy since the start, in the 10 ms steps of `/proc/stat`.
fn machine_cpu_s() -> f64 {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields = text.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let counts: Vec<f64> = fields.filter_map(|field| field.parse().ok()).collect();
    // user nice system idle iowait irq softirq
    [0, 1, 2, 5, 6].iter().filter_map(|&index| counts.get(index)).sum::<f64>() / 100.0
}

fn print_tables(groups: &[Group], samples: &[Vec<Samples>]) {
    let mut section = "";
    for (group, samples) in groups.iter().zip(samples) {
        if group.section != section {
            section = group.section;
            println!("\n## {section}");
        }
        println!(
            "\n| {} | GB/s | rate, ratio | CPU s/GiB | CPU, ratio | enters/GiB | submit us | \
             iou-wrk |\n|---|--:|--:|--:|--:|--:|--:|--:|",
            group.base.request()
        );
        let bases: Vec<Outcome> =
            samples.iter().flat_map(|one| &one.pairs).map(|pair| pair.0).collect();
        println!("{}", row(&group.base.title(&group.base), &bases, &[]));
        for (case, samples) in group.others.iter().zip(samples) {
            let title = case.title(&group.base);
            if let Some(error) = &samples.refused {
                println!("| {title} | refused: {error} | | | | | | |");
                continue;
            }
            let others: Vec<Outcome> = samples.pairs.iter().map(|pair| pair.1).collect();
            println!("{}", row(&title, &others, &samples.pairs));
        }
    }
}

fn row(title: &str, outcomes: &[Outcome], pairs: &[(Outcome, Outcome)]) -> String {
    let all = |of: fn(&Outcome) -> f64| quartiles(outcomes.iter().map(of).collect())[1];
    let ratio = |of: fn(&Outcome) -> f64| {
        let [low, middle, high] =
            quartiles(pairs.iter().map(|(base, other)| of(other) / of(base)).collect());
        format!("{middle:.2} ({low:.2}-{high:.2})")
    };
    let (rate, cpu) = if pairs.is_empty() {
        ("1".to_owned(), "1".to_owned())
    } else {
        (ratio(|one| one.bytes_per_second), ratio(|one| one.cpu_seconds_per_gib))
    };
    let submit = quartiles(outcomes.iter().filter_map(|one| one.submit_us).collect())[1];
    let submit = if submit.is_nan() { "-".to_owned() } else { format!("{submit:.1}") };
    let prepare_ms = all(|one| one.prepare_s) * 1e3;
    let title = if prepare_ms > 0.0 {
        format!("{title}; prepared in {prepare_ms:.1} ms")
    } else {
        title.to_owned()
    };
    format!(
        "| {title} | {:.2} | {rate} | {:.4} | {cpu} | {:.0} | {submit} | {:.0} |",
        all(|one| one.bytes_per_second) / 1e9,
        all(|one| one.cpu_seconds_per_gib),
        all(|one| one.enters_per_gib),
        all(|one| one.kernel_workers as f64),
    )
}

/// Lower quartile, median and upper quartile; not a number if there is nothing.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_unstable_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| {
        let last = values.len().saturating_sub(1);
        values.get((last * quarter + 2) / 4).copied().unwrap_or(f64::NAN)
    })
}

fn shown(bytes: usize) -> String {
    if bytes >= MIB { format!("{} MiB", bytes / MIB) } else { format!("{} KiB", bytes / KIB) }
}
