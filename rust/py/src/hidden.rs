//! `hidden`: what of a round leaves memory, asked of the planner.

use std::collections::HashMap;

use pyo3::prelude::*;
use ssdtrain_plan::hidden::{self as plan, Copies, Item, Links};

/// The fields of `planning.policy.Item`.
type Fields = (i64, u64, f64, f64, Option<usize>);

/// Of what leaves: the latest start of its way back; when it has been copied from its GPU, if that
/// is known; and the bytes of pinned memory in which it stays, if it does.
type Leaving = (f64, Option<f64>, Option<u64>);

/// What leaves of a round, by its key.
#[pyfunction]
#[pyo3(signature = (
    items, *, write, read, copies, host_bytes, page_bytes, margin_s, round_trip_factor
))]
#[expect(
    clippy::too_many_arguments,
    clippy::needless_pass_by_value,
    reason = "what Python gives, with its keywords"
)]
pub fn hidden(
    items: Vec<Fields>,
    write: f64,
    read: f64,
    copies: Vec<(usize, f64, f64)>,
    host_bytes: u64,
    page_bytes: u64,
    margin_s: f64,
    round_trip_factor: f64,
) -> HashMap<i64, Leaving> {
    let copies = copies.into_iter().map(|(gpu, down, up)| Copies { gpu, down, up }).collect();
    let links = Links { write, read, copies, host_bytes, page_bytes, margin_s, round_trip_factor };
    let item =
        |&(_, nbytes, packed_s, needed_s, gpu): &Fields| Item { nbytes, packed_s, needed_s, gpu };
    let own: Vec<_> = items.iter().map(item).collect();
    let leaving = plan::hidden(&own, &links);
    let entry = |one: &plan::Leaving| {
        let pinned_bytes = one.is_pinned.then(|| links.pages(&own[one.place]));
        (items[one.place].0, (one.start_by_s, one.copied_s, pinned_bytes))
    };
    leaving.iter().map(entry).collect()
}
