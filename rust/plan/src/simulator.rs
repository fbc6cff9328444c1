//! Plays a trace on a machine while a director moves tensors. It judges every plan.
//!
//! The events of one instant have a fixed order: transfers end, the kernel ends and the director
//! adds moves, the next kernel waits, room is made, transfers start, the kernel starts. A tensor
//! that the director does not fetch is fetched on demand, and room is made by least recent use: a
//! bad plan is slow, never wrong.

use crate::machine::Machine;
use crate::moves::{Move, Plan};
use crate::timeline::{Stall, Stuck, Timeline};
use crate::trace::Trace;
pub use crate::world::{Place, World};

/// Decides the moves.
pub trait Director {
    /// Adds the moves asked for at the end of a kernel, counted from the first step.
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

/// Plays some steps. `seconds` has the time of each kernel, which may differ from the trace's.
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
    // Seconds left of the running kernel at full speed; set after bytes have moved beside it.
    let mut kernel_left_s: Option<f64> = None;
    let mut last_arrival = None;
    world.begin_waiting(0);
    loop {
        world.settle();
        if world.is_waiting {
            let blamed = world
                .uses()
                .iter()
                .find(|&&tensor| !matches!(world.place(tensor), Place::Device | Place::Nowhere));
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
            for planned in &moves {
                world.issue(planned);
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
