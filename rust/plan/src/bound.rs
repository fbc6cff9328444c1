//! A lower bound of the step's time that no plan can beat, by arithmetic alone.
//!
//! While a kernel runs, the living bytes that the device cannot hold are elsewhere. Those of locals
//! were written since the step began and are read before it ends. Those of globals are written and
//! read once in each step. A drive of 2 GB/s that has to take 10 GB before some kernel and give
//! them back after it makes a step of 10 s or more, however short the kernels.

use crate::machine::{Machine, Way};
use crate::trace::Trace;

/// Lower bound, in seconds, of a steady step of a trace.
pub fn least_step_seconds(trace: &Trace, machine: &Machine) -> f64 {
    let globals: u64 =
        trace.tensors().iter().filter(|tensor| tensor.is_global).map(|tensor| tensor.bytes).sum();
    let unused: u64 = (0..trace.tensors().len() as u32)
        .filter(|&tensor| {
            trace.tensors()[tensor as usize].is_global && trace.users(tensor).is_empty()
        })
        .map(|tensor| trace.tensors()[tensor as usize].bytes)
        .sum();
    let ideal = trace.ideal_seconds();
    let mut least = ideal;
    let mut before = 0.0;
    for (kernel, live) in trace.kernels().iter().zip(trace.live_bytes()) {
        let after = ideal - before - kernel.seconds;
        let locals = (live - globals).saturating_sub(machine.device_bytes);
        let step = seconds_for(machine, Way::Out, locals).max(before)
            + kernel.seconds
            + seconds_for(machine, Way::In, locals).max(after);
        let all = (live - unused).saturating_sub(machine.device_bytes);
        least = least.max(step).max(seconds_for(machine, Way::Out, all)).max(seconds_for(
            machine,
            Way::In,
            all,
        ));
        before += kernel.seconds;
    }
    least
}

/// The shortest time in which bytes go in one direction: all over the bus, and those that the host
/// cannot hold to or from the drives.
fn seconds_for(machine: &Machine, way: Way, bytes: u64) -> f64 {
    let drives = bytes.saturating_sub(machine.host_bytes) as f64 / machine.ssd.of(way);
    (bytes as f64 / machine.bus.of(way)).max(drives)
}
