//! A plan: a list of moves, each with its tensor, its tier and the kernel after which it begins.

use crate::machine::{Machine, Tier};
use crate::trace::Trace;
use std::fmt;

/// The action of a move.
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
    /// The tensor.
    pub tensor: u32,
    /// The action.
    pub action: Action,
    /// The kernel at whose end the move is asked for.
    pub after: u32,
    /// Among transfers that wait for the same channel, lower numbers go first.
    pub priority: f64,
}

/// The error of moves that are no plan for a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError(String);

impl fmt::Display for PlanError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for PlanError {}

/// The tier of an eviction that its tensor does not allow; `None` if the move is allowed.
fn refused(planned: &Move, trace: &Trace) -> Option<Tier> {
    match planned.action {
        Action::Evict(tier) => {
            Some(tier).filter(|&tier| !trace.tensors()[planned.tensor as usize].places.has(tier))
        }
        Action::Fetch => None,
    }
}

/// The moves of a step, the same in each step, sorted by the kernel that they follow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    moves: Vec<Move>,
    /// The index of the first move after each kernel, and the number of moves as a last entry.
    starts: Vec<usize>,
}

impl Plan {
    /// Checks moves against a trace and a machine. Moves after the same kernel keep their order.
    pub fn new(mut moves: Vec<Move>, trace: &Trace, machine: &Machine) -> Result<Self, PlanError> {
        let (kernel_count, tensor_count) = (trace.kernels().len(), trace.tensors().len());
        for (index, planned) in moves.iter().enumerate() {
            let wrong = if planned.tensor as usize >= tensor_count {
                format!("tensor {}, but there are {tensor_count}", planned.tensor)
            } else if planned.after as usize >= kernel_count {
                format!("kernel {}, but there are {kernel_count}", planned.after)
            } else if planned.action == Action::Evict(Tier::Host) && machine.host_bytes == 0 {
                "host memory, of which this machine lends none".to_owned()
            } else if let Some(tier) = refused(planned, trace) {
                format!("{tier:?} as a place of tensor {}, which may not go there", planned.tensor)
            } else if !planned.priority.is_finite() {
                format!("priority {}; it has to be finite", planned.priority)
            } else {
                continue;
            };
            return Err(PlanError(format!("move {index} names {wrong}")));
        }
        moves.sort_by_key(|planned| planned.after);
        let starts = (0..=kernel_count)
            .map(|kernel| moves.partition_point(|planned| (planned.after as usize) < kernel))
            .collect();
        Ok(Self { moves, starts })
    }

    /// The plan without moves.
    pub fn none(trace: &Trace) -> Self {
        Self { moves: Vec::new(), starts: vec![0; trace.kernels().len() + 1] }
    }

    /// All moves.
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// The moves after a kernel.
    pub fn after(&self, kernel: usize) -> &[Move] {
        &self.moves[self.starts[kernel]..self.starts[kernel + 1]]
    }
}
