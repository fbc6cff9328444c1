//! One training step: its kernels, its tensors, and the tensors that each kernel uses.

use crate::machine::Tier;
use std::fmt;

/// The purpose of a tensor. The simulator treats all classes alike; budgets and reports tell them
/// apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Class {
    /// Made in forward for backward.
    #[default]
    Activation,
    /// A parameter of the model.
    Weight,
    /// Made in backward for the optimizer.
    Gradient,
    /// State that the optimizer keeps from step to step.
    OptimizerState,
    /// Scratch memory of one kernel.
    Workspace,
}

/// Number of classes.
pub const CLASS_COUNT: usize = 5;

/// The tiers to which a tensor may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// To the drives.
    pub ssd: bool,
    /// To the host's memory.
    pub host: bool,
}

impl Places {
    /// No tier: the tensor stays.
    pub const NONE: Self = Self { ssd: false, host: false };

    /// Returns true if the tensor may go to a tier.
    pub fn has(&self, tier: Tier) -> bool {
        match tier {
            Tier::Ssd => self.ssd,
            Tier::Host => self.host,
        }
    }
}

impl Default for Places {
    fn default() -> Self {
        Self { ssd: true, host: true }
    }
}

/// One tensor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tensor {
    /// Its size.
    pub bytes: u64,
    /// Its purpose.
    pub class: Class,
    /// True if it lives across steps. Other tensors, the locals, live from their first to their
    /// last use in a step.
    pub is_global: bool,
    /// The tiers to which it may go.
    pub places: Places,
    /// Seconds to compute it again from tensors that are kept; `None` if that cannot be done.
    pub recompute_s: Option<f64>,
}

/// One kernel, as a recorder wrote it down.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Seconds that it computes when all its tensors are there.
    pub seconds: f64,
    /// The tensors it reads or writes, each once.
    pub uses: Vec<u32>,
}

/// The error of kernels and tensors that are no trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceError(String);

impl fmt::Display for TraceError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for TraceError {}

/// One training step that repeats: kernel 0 follows the last kernel.
#[derive(Clone, Debug)]
pub struct Trace {
    kernels: Vec<Kernel>,
    tensors: Vec<Tensor>,
    /// For each tensor the kernels that use it, in order.
    users: Vec<Vec<u32>>,
    births: Vec<Vec<u32>>,
    deaths: Vec<Vec<u32>>,
}

impl Trace {
    /// Checks a step and finds the first and the last use of its tensors.
    pub fn new(kernels: Vec<Kernel>, tensors: Vec<Tensor>) -> Result<Self, TraceError> {
        let mut uses_of = vec![Vec::new(); tensors.len()];
        for (index, kernel) in kernels.iter().enumerate() {
            if !(kernel.seconds.is_finite() && kernel.seconds > 0.0) {
                return Err(TraceError(format!(
                    "kernel {index} takes {} s; every kernel needs a time above 0",
                    kernel.seconds
                )));
            }
            for &tensor in &kernel.uses {
                let kernels_of: &mut Vec<u32> =
                    uses_of.get_mut(tensor as usize).ok_or_else(|| {
                        TraceError(format!(
                            "kernel {index} uses tensor {tensor}, but there are {} tensors",
                            tensors.len()
                        ))
                    })?;
                if kernels_of.last() == Some(&(index as u32)) {
                    return Err(TraceError(format!(
                        "kernel {index} names tensor {tensor} twice; name each use once"
                    )));
                }
                kernels_of.push(index as u32);
            }
        }
        if kernels.is_empty() {
            return Err(TraceError("a trace needs at least one kernel".to_owned()));
        }
        let mut births = vec![Vec::new(); kernels.len()];
        let mut deaths = vec![Vec::new(); kernels.len()];
        for (tensor, uses) in uses_of.iter().enumerate() {
            if let (false, Some(&first), Some(&last)) =
                (tensors[tensor].is_global, uses.first(), uses.last())
            {
                births[first as usize].push(tensor as u32);
                deaths[last as usize].push(tensor as u32);
            }
        }
        Ok(Self { kernels, tensors, users: uses_of, births, deaths })
    }

    /// The kernels of one step.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Every tensor.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The kernels that use a tensor, in order.
    pub fn users(&self, tensor: u32) -> &[u32] {
        &self.users[tensor as usize]
    }

    /// The locals whose first use is this kernel.
    pub fn births(&self, kernel: usize) -> &[u32] {
        &self.births[kernel]
    }

    /// The locals whose last use is this kernel.
    pub fn deaths(&self, kernel: usize) -> &[u32] {
        &self.deaths[kernel]
    }

    /// Returns true if a kernel is the first use of a local.
    pub fn is_born_at(&self, tensor: u32, kernel: usize) -> bool {
        !self.tensors[tensor as usize].is_global
            && self.users[tensor as usize].first() == Some(&(kernel as u32))
    }

    /// Seconds of a step in which no kernel waits.
    pub fn ideal_seconds(&self) -> f64 {
        self.kernels.iter().map(|kernel| kernel.seconds).sum()
    }

    /// Bytes of the living tensors while each kernel runs, if none is moved away.
    pub fn live_bytes(&self) -> Vec<u64> {
        let globals =
            self.tensors.iter().filter(|tensor| tensor.is_global).map(|tensor| tensor.bytes).sum();
        let mut live: u64 = globals;
        let bytes = |list: &[u32]| -> u64 {
            list.iter().map(|&tensor| self.tensors[tensor as usize].bytes).sum()
        };
        (0..self.kernels.len())
            .map(|kernel| {
                live += bytes(&self.births[kernel]);
                let here = live;
                live -= bytes(&self.deaths[kernel]);
                here
            })
            .collect()
    }
}
