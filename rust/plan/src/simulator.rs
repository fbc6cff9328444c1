//! Plays a trace on a machine while a director moves tensors; it judges every plan, ours included.
//!
//! What falls on one instant is taken in a fixed order: transfers end, the kernel ends and the
//! director speaks, the next kernel waits, room is made, transfers start, the kernel starts. What a
//! director leaves out is fetched on demand, and evicted by least recent use: a bad plan is slow,
//! never wrong.

use crate::machine::Machine;
use crate::moves::{Move, Plan};
use crate::timeline::{Stall, Stuck, Timeline};
use crate::trace::Trace;
pub use crate::world::{Place, World};

/// Who decides what is moved.
pub trait Director {
    /// The moves asked for at the end of a kernel, counted from the first step on.
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>);
}

impl<T: Director> Director for &mut T {
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>) {
        (**self).moves_after(kernel, world, moves);
    }
}

impl Director for &Plan {
    fn moves_after(&mut self, kernel: usize, world: &World, moves: &mut Vec<Move>) {
        moves.extend_from_slice(self.after(kernel % world.trace.kernels().len()));
    }
}

/// Play some steps. `seconds` has the time of each kernel, which may differ from the trace's.
pub fn run(
    trace: &Trace,
    machine: &Machine,
    seconds: &[f64],
    step_count: usize,
    mut director: impl Director,
) -> Result<Timeline, Stuck> {
    let kernel_count = seconds.len();
    let mut world = World::new(trace, machine);
    let mut timeline = Timeline::new(kernel_count, step_count);
    let mut moves = Vec::new();
    let mut waiting_since = 0.0;
    let mut kernel_end = f64::INFINITY;
    // What is left of the running kernel at full speed, once bytes have moved beside it.
    let mut kernel_left_s: Option<f64> = None;
    let mut last_arrival = None;
    world.begin_waiting(0);
    loop {
        world.settle();
        if world.is_waiting {
            let blamed = world
                .uses()
                .iter()
                .find(|&&one| !matches!(world.place(one), Place::Device | Place::Nowhere));
            last_arrival = blamed.copied().or(last_arrival);
            if world.try_start_kernel() {
                let stall_s = world.now - waiting_since;
                timeline.start(world.now, Stall { seconds: stall_s, tensor: last_arrival });
                kernel_end = world.now + seconds[world.step_kernel()];
            }
        }
        timeline.resident(world.now, world.used_bytes, world.used_by_class, world.host_used_bytes);
        let speed = if machine.has_price() { world.channels.speed(machine) } else { 1.0 };
        if kernel_end.is_finite() && (speed < 1.0 || kernel_left_s.is_some()) {
            let left_s = kernel_left_s.unwrap_or(kernel_end - world.now);
            kernel_left_s = Some(left_s);
            kernel_end = world.now + left_s / speed;
        }
        let now = world.channels.next_end().min(kernel_end);
        if !now.is_finite() {
            return Err(Stuck { kernel: world.step_kernel(), need_bytes: world.need_bytes });
        }
        if let Some(left_s) = &mut kernel_left_s {
            *left_s = (*left_s - (now - world.now) * speed).max(0.0);
        }
        world.now = now;
        world.end_transfers();
        if kernel_end <= now {
            kernel_end = f64::INFINITY;
            kernel_left_s = None;
            world.end_kernel();
            timeline.end(now, &world.channels);
            moves.clear();
            director.moves_after(world.kernel, &world, &mut moves);
            for one in &moves {
                world.issue(one);
            }
            if world.kernel + 1 == kernel_count * step_count {
                timeline.close(&world.channels);
                return Ok(timeline);
            }
            waiting_since = now;
            last_arrival = None;
            world.begin_waiting(world.kernel + 1);
        }
    }
}
