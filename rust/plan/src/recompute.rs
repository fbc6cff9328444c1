//! A step in which some tensors are dropped after forward and computed again before backward.

use crate::trace::{Class, Kernel, Tensor, Trace};

/// A tensor that could be computed again: it is dropped after one kernel and needed by another.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The tensor.
    pub tensor: u32,
    after: u32,
    next: u32,
    seconds: f64,
}

/// Activations that can be computed again, in the order of their cost for each byte.
pub fn candidates(trace: &Trace) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for (tensor, entry) in trace.tensors().iter().enumerate() {
        let users = trace.users(tensor as u32);
        let Some(seconds) = entry.recompute_s else { continue };
        if entry.is_global || entry.class != Class::Activation || entry.bytes == 0 {
            continue;
        }
        let gaps = users.windows(2).map(|pair| (pair[1] - pair[0], pair[0], pair[1]));
        if let Some((_, after, next)) = gaps.max_by_key(|gap| gap.0).filter(|gap| gap.0 > 1) {
            let candidate = Candidate { tensor: tensor as u32, after, next, seconds };
            found.push((seconds / entry.bytes as f64, candidate));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.tensor.cmp(&b.1.tensor)));
    found.into_iter().map(|(_, candidate)| candidate).collect()
}

/// The step in which these tensors are computed again. Each becomes two tensors: the first ends at
/// the drop, the second begins at the next use, whose kernel takes the additional time. The inputs
/// are assumed to be there; the recorder of `recompute_s` has to make sure of that.
///
/// # Panics
/// Never: the changed step is a trace.
pub fn with_recomputed(trace: &Trace, chosen: &[Candidate]) -> Trace {
    let mut kernels: Vec<Kernel> = trace.kernels().to_vec();
    let mut tensors: Vec<Tensor> = trace.tensors().to_vec();
    for candidate in chosen {
        let second = tensors.len() as u32;
        tensors.push(tensors[candidate.tensor as usize]);
        kernels[candidate.next as usize].seconds += candidate.seconds;
        for &user in trace.users(candidate.tensor).iter().filter(|&&user| user > candidate.after) {
            for used in &mut kernels[user as usize].uses {
                if *used == candidate.tensor {
                    *used = second;
                }
            }
        }
    }
    Trace::new(kernels, tensors).expect("each kernel still names each tensor once")
}
