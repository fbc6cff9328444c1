//! A step in which some tensors are dropped after forward and computed again before backward.

use crate::trace::{Class, Kernel, Tensor, Trace};

/// A tensor that could be computed again: dropped after one kernel, needed by another.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The tensor.
    pub tensor: u32,
    after: u32,
    next: u32,
    seconds: f64,
}

/// Activations that can be computed again, the cheapest for each byte first.
pub fn candidates(trace: &Trace) -> Vec<Candidate> {
    let mut found: Vec<(f64, Candidate)> = Vec::new();
    for (tensor, one) in trace.tensors().iter().enumerate() {
        let users = trace.users(tensor as u32);
        let Some(seconds) = one.recompute_s else { continue };
        if one.is_global || one.class != Class::Activation || one.bytes == 0 {
            continue;
        }
        let gaps = users.windows(2).map(|pair| (pair[1] - pair[0], pair[0], pair[1]));
        if let Some((_, after, next)) = gaps.max_by_key(|gap| gap.0).filter(|gap| gap.0 > 1) {
            let candidate = Candidate { tensor: tensor as u32, after, next, seconds };
            found.push((seconds / one.bytes as f64, candidate));
        }
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.tensor.cmp(&b.1.tensor)));
    found.into_iter().map(|(_, one)| one).collect()
}

/// The step in which these are computed again: each is two tensors, one that ends where it is
/// dropped and one that begins where it is needed, with the time that it takes added there. What it
/// is computed from is taken to be there, as the recorder of `recompute_s` has to see to.
///
/// # Panics
/// Never: what is made of a trace is one.
pub fn with_recomputed(trace: &Trace, chosen: &[Candidate]) -> Trace {
    let mut kernels: Vec<Kernel> = trace.kernels().to_vec();
    let mut tensors: Vec<Tensor> = trace.tensors().to_vec();
    for one in chosen {
        let second = tensors.len() as u32;
        tensors.push(tensors[one.tensor as usize]);
        kernels[one.next as usize].seconds += one.seconds;
        for &user in trace.users(one.tensor).iter().filter(|&&user| user > one.after) {
            for used in &mut kernels[user as usize].uses {
                if *used == one.tensor {
                    *used = second;
                }
            }
        }
    }
    Trace::new(kernels, tensors).expect("each kernel still names each tensor once")
}
