//! Reads G10's traces, replays plans on them, and makes plans. `benches/g10.py` builds and runs it.

use ssdtrain_plan::bound::least_step_seconds;
use ssdtrain_plan::machine::{Machine, Rates, Tier};
use ssdtrain_plan::moves::{Action, Move, Plan};
use ssdtrain_plan::planner;
use ssdtrain_plan::pruning;
use ssdtrain_plan::score::score;
use ssdtrain_plan::trace::{Class, Kernel, Tensor, Trace};
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

type Failure = Box<dyn Error>;

const CLOCK_HZ: f64 = 1.2e9;

/// Shorter plans that are judged at the end, for each look-ahead that was tried.
const JUDGED_PER_TRY: usize = 8;

/// The machine of the replay's rules, with or without host memory.
fn machine(class: &str) -> Result<Machine, Failure> {
    let host_bytes = match class {
        "host+ssd" => 128 << 30,
        "ssd" => 0,
        _ => return Err(format!("class {class}; it is host+ssd or ssd").into()),
    };
    Ok(Machine {
        device_bytes: 40 << 30,
        host_bytes,
        ssd: Rates { out: 3.15e9, back: 3.15e9 },
        bus: Rates { out: 15.754e9, back: 15.754e9 },
        latency_s: 0.0,
        ..Machine::default()
    })
}

/// The rows of a table, without its comment line.
fn rows(path: &Path) -> Result<Vec<Vec<String>>, Failure> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split('\t').map(str::to_owned).collect())
        .collect())
}

fn cell<T: std::str::FromStr>(row: &[String], column: usize) -> Result<T, Failure> {
    let text = row.get(column).ok_or_else(|| format!("row {row:?} has no column {column}"))?;
    text.parse().map_err(|_| format!("row {row:?}: column {column} is no number").into())
}

fn read_trace(folder: &Path, batch: &str) -> Result<Trace, Failure> {
    let tensors = rows(&folder.join(format!("{batch}.tensors.tsv")))?
        .iter()
        .map(|row| {
            let is_global = cell::<u8>(row, 3)? == 1;
            let class = if is_global { Class::Weight } else { Class::Activation };
            Ok(Tensor { bytes: cell(row, 2)?, class, is_global, ..Tensor::default() })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    let kernels = rows(&folder.join(format!("{batch}.kernels.tsv")))?
        .iter()
        .map(|row| {
            let mut uses: Vec<u32> = Vec::new();
            for column in [6, 7] {
                let list = row.get(column).map_or("", String::as_str);
                for number in list.split(',').filter(|one| !one.is_empty()) {
                    let tensor = number.parse()?;
                    if !uses.contains(&tensor) {
                        uses.push(tensor);
                    }
                }
            }
            Ok(Kernel { seconds: cell::<f64>(row, 2)? / CLOCK_HZ, uses })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    Ok(Trace::new(kernels, tensors)?)
}

fn read_move(row: &[String]) -> Result<Move, Failure> {
    let action = match row.get(1).map(String::as_str) {
        Some("fetch") => Action::Fetch,
        Some("ssd") => Action::Evict(Tier::Ssd),
        Some("host") => Action::Evict(Tier::Host),
        _ => return Err(format!("row {row:?} says neither fetch nor ssd nor host").into()),
    };
    Ok(Move { tensor: cell(row, 0)?, action, after: cell(row, 2)?, priority: cell(row, 3)? })
}

/// A trace and a class, as a request names them.
struct Point {
    trace: Trace,
    machine: Machine,
}

impl Point {
    fn read(graphs: &str, model: &str, batch: &str, class: &str) -> Result<Self, Failure> {
        let trace = read_trace(&Path::new(graphs).join(model), batch)?;
        Ok(Self { trace, machine: machine(class)? })
    }
}

/// `replay GRAPHS SEED`: plans on standard input, each a row `name model batch class` and a row
/// for each move, then an empty one. A row with name and score goes out for each.
fn replay(arguments: &[String]) -> Result<(), Failure> {
    let [graphs, seed] = arguments else { return Err("replay GRAPHS SEED".into()) };
    let mut lines = std::io::stdin().lines();
    while let Some(line) = lines.next() {
        let line = line?;
        let [name, model, batch, class] = line.split('\t').collect::<Vec<_>>()[..] else {
            return Err(format!("`{line}` names no plan").into());
        };
        let point = Point::read(graphs, model, batch, class)?;
        let mut moves = Vec::new();
        for line in lines.by_ref() {
            let row: Vec<String> = line?.split('\t').map(str::to_owned).collect();
            if row.len() == 1 {
                break;
            }
            moves.push(read_move(&row)?);
        }
        let plan = Plan::new(moves, &point.trace, &point.machine)
            .map_err(|error| format!("{name}: {error}"))?;
        println!("{name}\t{:.6}", score(&point.trace, &point.machine, &plan, seed.parse()?)?);
    }
    Ok(())
}

fn print_plan(name: &str, point: &Point, plan: &Plan, seconds: f64) {
    let ideal = point.trace.ideal_seconds();
    let least = least_step_seconds(&point.trace, &point.machine);
    let mut text = format!("{name}\t{:.6}\t{:.6}\n", ideal / seconds, ideal / least);
    for one in plan.moves() {
        let action = match one.action {
            Action::Fetch => "fetch",
            Action::Evict(Tier::Ssd) => "ssd",
            Action::Evict(Tier::Host) => "host",
        };
        let _ = writeln!(text, "{}\t{action}\t{}\t{:?}", one.tensor, one.after, one.priority);
    }
    println!("{text}");
}

/// `plan GRAPHS THREADS TRIES`: a row `model batch class` on standard input for each plan. What
/// `replay` takes goes out; its first row ends with the score and the bound on it by arithmetic.
fn plan(arguments: &[String]) -> Result<(), Failure> {
    let [graphs, threads, tries] = arguments else {
        return Err("plan GRAPHS THREADS TRIES".into());
    };
    let tries: usize = tries.parse()?;
    let judged_max = tries * JUDGED_PER_TRY;
    let rows: Vec<String> = std::io::stdin().lines().collect::<Result<_, _>>()?;
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), String> {
        while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
            let [model, batch, class] = row.split('\t').collect::<Vec<_>>()[..] else {
                return Err(format!("`{row}` names no point"));
            };
            let point =
                Point::read(graphs, model, batch, class).map_err(|error| error.to_string())?;
            let found = planner::search(&point.trace, &point.machine, tries)
                .and_then(|found| pruning::prune(&point.trace, &point.machine, found, judged_max))
                .map_err(|error| format!("{row}: {error}"))?;
            print_plan(row, &point, &found.plan, found.seconds);
        }
        Ok(())
    };
    let count: usize = threads.parse()?;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..count).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|one| one.join().expect("a worker panicked"))
    })?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((verb, rest)) if verb == "replay" => replay(rest),
        Some((verb, rest)) if verb == "plan" => plan(rest),
        _ => Err("say `replay` or `plan`".into()),
    }
}
