//! The score of a plan: five steps with the same moves, and kernel times with optional noise.

use crate::machine::Machine;
use crate::moves::Plan;
use crate::simulator;
use crate::timeline::Stuck;
use crate::trace::Trace;

/// Steps that are played. The first warms up.
pub const STEP_COUNT: usize = 5;

/// Largest difference of a noisy time from the trace's, as a share of it.
pub const NOISE: f64 = 0.25;

/// The kernel times of a trace with the noise of a seed. Seed 0 adds no noise.
pub fn kernel_seconds(trace: &Trace, seed: u64) -> Vec<f64> {
    trace
        .kernels()
        .iter()
        .enumerate()
        .map(|(index, kernel)| match seed {
            0 => kernel.seconds,
            seed => kernel.seconds * (1.0 + NOISE * (2.0 * uniform(seed, index as u64) - 1.0)),
        })
        .collect()
}

/// A number in [0, 1) for a seed and a kernel, the same on every machine.
fn uniform(seed: u64, kernel: u64) -> f64 {
    let start = seed.wrapping_mul(1 << 32).wrapping_add(kernel + 1);
    (mix(start) >> 11) as f64 / (1u64 << 53) as f64
}

/// Scatters numbers over all of 64 bits (the last steps of `SplitMix64`).
pub(crate) fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// The kernels' time as a share of the longest step's: 1 if no kernel ever waits.
pub fn score(trace: &Trace, machine: &Machine, plan: &Plan, seed: u64) -> Result<f64, Stuck> {
    let seconds = kernel_seconds(trace, seed);
    let timeline = simulator::run(trace, machine, &seconds, STEP_COUNT, plan)?;
    Ok(seconds.iter().sum::<f64>() / timeline.steady_seconds())
}
