//! Saves: slots for the bytes of tensors, and the copies into them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::cuda::stream::{DeviceRange, Event, UserStream, is_capturing};
use crate::error::Result;
use crate::memory::arena::PAGE_BYTES;
use crate::memory::pinned::{PinnedSlot, cut};
use crate::staging::mailbox::Task;
use crate::staging::shared::{Begun, Shared};
use crate::staging::staged::{Parcel, Staged, Tier};
use crate::staging::{Full, Refused, Saves};

/// Copies share the event of their end up to so many bytes: on a link of 25 GB/s the first of them
/// is then seen to end a third of a millisecond late.
const GROUP_BYTES: usize = 8 << 20;

/// A part of a tensor, with its slot.
struct Part {
    range: DeviceRange,
    slot: Arc<PinnedSlot>,
    tier: Tier,
    /// The place of its tensor among those that are saved together.
    place: usize,
    is_last: bool,
}

/// See [`Staging::save_all`](super::Staging::save_all).
pub fn save_all(shared: &Shared, sources: &[(DeviceRange, Tier)], stream: UserStream) -> Saves {
    let mut begun = Vec::with_capacity(sources.len());
    let saved = shared.gpu.within(|_| Ok(begin_all(shared, sources, stream, &mut begun).err()));
    Saves { begun, refused: saved.unwrap_or_else(|error| Some(error.into())) }
}

fn begin_all(
    shared: &Shared,
    sources: &[(DeviceRange, Tier)],
    stream: UserStream,
    begun: &mut Vec<Staged>,
) -> std::result::Result<(), Refused> {
    if is_capturing(&shared.gpu, stream)? {
        return Err(Refused::Capturing);
    }
    let (mut parts, mut refused) = (Vec::with_capacity(sources.len()), Ok(()));
    for (place, &(source, tier)) in sources.iter().enumerate() {
        match slots(shared, source.len(), tier) {
            Ok(slots) => parts.extend(parts_of(place, source, slots, tier)),
            Err(why) => {
                refused = Err(why);
                break;
            }
        }
    }
    copy_all(shared, &parts, stream, begun)?;
    refused
}

/// The slots for a tensor.
fn slots(shared: &Shared, len: usize, tier: Tier) -> std::result::Result<Vec<PinnedSlot>, Refused> {
    if tier == Tier::Disk {
        shared.store.refuse_without_directory()?;
        if len > longest_bytes(shared) {
            return Err(Refused::Full(Full::TooLong));
        }
    }
    shared.mailbox.refuse_if_closed()?;
    let (slots, why_not) = match tier {
        Tier::Disk => {
            let whole_bytes = whole_bytes_max(shared);
            let part_bytes = if len <= whole_bytes { whole_bytes } else { part_bytes(shared) };
            let slots = cut(len, part_bytes, part_bytes, |len| shared.down.pool.slot(len));
            (slots, why_full(shared))
        }
        Tier::Pinned => (shared.tier.slots(len), Full::Pinned),
    };
    slots.ok_or(Refused::Full(why_not))
}

fn parts_of(
    place: usize,
    source: DeviceRange,
    slots: Vec<PinnedSlot>,
    tier: Tier,
) -> impl Iterator<Item = Part> {
    let mut start = 0;
    slots.into_iter().map(move |slot| {
        let range = source.part(start, slot.len().min(source.len() - start));
        start += range.len();
        Part { range, slot: Arc::new(slot), tier, place, is_last: start == source.len() }
    })
}

/// Begins the copies. The tensors are ready after the work of `stream` so far, and the stream for
/// copies goes on in order: its first copy of these waits for all.
fn copy_all(
    shared: &Shared,
    parts: &[Part],
    stream: UserStream,
    begun: &mut Vec<Staged>,
) -> Result<()> {
    if parts.is_empty() {
        return Ok(());
    }
    let ready = shared.copies.record(stream)?;
    let (mut rest, mut whole_count) = (parts, 0);
    while !rest.is_empty() {
        let (group, later) = rest.split_at(group_count(rest));
        let copied = copy_group(shared, group, &ready);
        if copied.is_err() && begun.len() > whole_count {
            // The caller may give this tensor to others, and parts of it are on their way.
            let _is_over = shared.down.stream.synchronize();
            begun.truncate(whole_count);
        }
        for (part, parcel) in group.iter().zip(copied?) {
            begun.resize_with(part.place + 1, Staged::new);
            begun[part.place].add(parcel);
            whole_count += usize::from(part.is_last);
        }
        rest = later;
    }
    Ok(())
}

/// The number of parts that share the event of their end.
fn group_count(parts: &[Part]) -> usize {
    let mut nbytes = 0;
    let fills = |part: &Part| {
        nbytes += part.range.len();
        nbytes >= GROUP_BYTES
    };
    parts.iter().position(fills).map_or(parts.len(), |place| place + 1)
}

fn copy_group(shared: &Shared, group: &[Part], ready: &Arc<Event>) -> Result<Vec<Arc<Parcel>>> {
    // defence: a copy down waits for what computes its source
    let after: [&Event; 1] = [ready];
    // A copy begins here, or at the end of the copy before it.
    let begun = Begun::At(Arc::clone(ready));
    let ranges = group.iter().map(|part| (&part.slot, part.range));
    let copied =
        shared.down.copy(&shared.copies, ranges, after, begun, |stream, slot, range| {
            stream.copy_down(range, slot)
        })?;
    let mut nbytes = 0;
    let parcels = group.iter().enumerate().map(|(number, part)| {
        let len = part.range.len();
        nbytes += len;
        let group_bytes = if number + 1 == group.len() { nbytes } else { 0 };
        let (slot, copied) = (Arc::clone(&part.slot), Arc::clone(&copied));
        let parcel = Arc::new(Parcel::new(slot, copied, (len, group_bytes), part.tier));
        shared.copying_count.fetch_add(1, Ordering::Relaxed);
        shared.down_bytes.fetch_add(len as u64, Ordering::Relaxed);
        if part.tier == Tier::Pinned {
            shared.staying_bytes.fetch_add(len as u64, Ordering::Relaxed);
        }
        shared.mailbox.post(Task::Copying(Arc::clone(&parcel)));
        parcel
    });
    Ok(parcels.collect())
}

fn why_full(shared: &Shared) -> Full {
    if shared.writing_count.load(Ordering::Relaxed) > 0 {
        Full::DiskBehind
    } else if shared.copying_count.load(Ordering::Relaxed) > 0 {
        Full::GpuBehind
    } else {
        Full::Pinned
    }
}

/// The largest tensor that can be saved to the disk and loaded.
pub fn longest_bytes(shared: &Shared) -> usize {
    let part_bytes = part_bytes(shared);
    let in_parts = shared.down.pool.slot_count_max(part_bytes) * part_bytes;
    in_parts.max(whole_bytes_max(shared))
}

/// The largest tensor that goes to the disk in one piece.
fn whole_bytes_max(shared: &Shared) -> usize {
    shared.down.pool.slot_bytes_max().min(shared.up.pool.slot_bytes_max())
}

/// The size of the parts in which a larger tensor goes: one is read while the one before it is
/// copied to the GPU.
fn part_bytes(shared: &Shared) -> usize {
    (whole_bytes_max(shared) / 2 / PAGE_BYTES * PAGE_BYTES).max(PAGE_BYTES)
}
