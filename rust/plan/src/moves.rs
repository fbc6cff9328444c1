//! A plan: which tensor is moved where, and after which kernel.

use crate::machine::{Machine, Tier};
use crate::trace::Trace;
use std::fmt;

/// What is done with a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It leaves the device's memory.
    Evict(Tier),
    /// It comes back.
    Fetch,
}

/// One move of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Move {
    /// Which tensor.
    pub tensor: u32,
    /// What is done with it.
    pub action: Action,
    /// The kernel at whose end the move is asked for.
    pub after: u32,
    /// Lower numbers go first among what waits for the same channel.
    pub priority: f64,
}

/// Why a list of moves is no plan for a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError(String);

impl fmt::Display for PlanError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for PlanError {}

/// The tier to which a move may not bring its tensor.
fn refused(one: &Move, trace: &Trace) -> Option<Tier> {
    match one.action {
        Action::Evict(tier) => {
            Some(tier).filter(|&tier| !trace.tensors()[one.tensor as usize].places.has(tier))
        }
        Action::Fetch => None,
    }
}

/// The moves of one step, the same in each, sorted by the kernel they follow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    moves: Vec<Move>,
    /// Where the moves after each kernel begin, and one entry more.
    starts: Vec<usize>,
}

impl Plan {
    /// Check moves against a trace and a machine. Moves after one kernel stay in their order.
    pub fn new(mut moves: Vec<Move>, trace: &Trace, machine: &Machine) -> Result<Self, PlanError> {
        let (kernel_count, tensor_count) = (trace.kernels().len(), trace.tensors().len());
        for (index, one) in moves.iter().enumerate() {
            let wrong = if one.tensor as usize >= tensor_count {
                format!("tensor {}, but there are {tensor_count}", one.tensor)
            } else if one.after as usize >= kernel_count {
                format!("kernel {}, but there are {kernel_count}", one.after)
            } else if one.action == Action::Evict(Tier::Host) && machine.host_bytes == 0 {
                "host memory, of which this machine lends none".to_owned()
            } else if let Some(tier) = refused(one, trace) {
                format!("{tier:?} as a place of tensor {}, which may not go there", one.tensor)
            } else if !one.priority.is_finite() {
                format!("priority {}; it has to be finite", one.priority)
            } else {
                continue;
            };
            return Err(PlanError(format!("move {index} names {wrong}")));
        }
        moves.sort_by_key(|one| one.after);
        let starts = (0..=kernel_count)
            .map(|kernel| moves.partition_point(|one| (one.after as usize) < kernel))
            .collect();
        Ok(Self { moves, starts })
    }

    /// The plan without moves.
    pub fn none(trace: &Trace) -> Self {
        Self { moves: Vec::new(), starts: vec![0; trace.kernels().len() + 1] }
    }

    /// Every move.
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// The moves after one kernel.
    pub fn after(&self, kernel: usize) -> &[Move] {
        &self.moves[self.starts[kernel]..self.starts[kernel + 1]]
    }
}
