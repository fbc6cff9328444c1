//! `hidden` asks the planner for the tensors of a round that leave memory.

use std::collections::HashMap;

use pyo3::prelude::*;
use ssdtrain_plan::hidden::{self as plan, Copies, Item, Links};

/// The fields of `planning.policy.Item`.
type Fields = (i64, u64, f64, f64, Option<usize>);

/// For a tensor that leaves: the latest start of its way back, and the bytes of pinned memory in
/// which it stays, if it does.
type Leaving = (f64, Option<u64>);

/// The tensors of a round that leave memory, by key.
#[pyfunction]
#[pyo3(signature = (
    items, *, write, read, copies, host_bytes, page_bytes, margin_s, round_trip_factor
))]
#[expect(
    clippy::too_many_arguments,
    clippy::needless_pass_by_value,
    reason = "keywords on the side of Python, with lists that PyO3 extracts"
)]
pub fn hidden(
    items: Vec<Fields>,
    write: f64,
    read: f64,
    copies: Vec<(usize, f64, f64, f64)>,
    host_bytes: u64,
    page_bytes: u64,
    margin_s: f64,
    round_trip_factor: f64,
) -> HashMap<i64, Leaving> {
    let copies = copies.into_iter();
    let copies = copies.map(|(gpu, down, up, longest)| Copies { gpu, down, up, longest }).collect();
    let links = Links { write, read, copies, host_bytes, page_bytes, margin_s, round_trip_factor };
    let item =
        |&(_, nbytes, packed_s, needed_s, gpu): &Fields| Item { nbytes, packed_s, needed_s, gpu };
    let own: Vec<_> = items.iter().map(item).collect();
    let leaving = plan::hidden(&own, &links);
    let entry = |leaving: &plan::Leaving| {
        let pinned_bytes = leaving.is_pinned.then(|| links.pages(&own[leaving.place]));
        (items[leaving.place].0, (leaving.start_by_s, pinned_bytes))
    };
    leaving.iter().map(entry).collect()
}
