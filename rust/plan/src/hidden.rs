//! What of a round hides behind its computing: the longest prefix of what it saved that can go to
//! the disk and come back in time.
//!
//! `SSDTrain` (arXiv 2408.10013, section 3.3) solves once for the amount that hides. Here a session
//! asks after a round, with what that measured: writes go one after the other from the front, reads
//! are chained backwards from their deadlines, and the first read begins when the last write has
//! ended. What is on a GPU takes the link of that GPU as well, and what stays in the memory of the
//! CPU takes that link alone.

/// A storage of a round. Moments are in seconds, on any clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Its size.
    pub nbytes: u64,
    /// When it was saved.
    pub packed_s: f64,
    /// When it was first needed.
    pub needed_s: f64,
    /// The GPU that it is on, if it is on one.
    pub gpu: Option<usize>,
}

/// What the copies from a GPU and to it do, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copies {
    /// Its number.
    pub gpu: usize,
    /// From it.
    pub down: f64,
    /// To it.
    pub up: f64,
}

/// What bytes move over, and what is asked of a way out and back.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    /// Bytes per second to the disk.
    pub write: f64,
    /// Bytes per second from the disk.
    pub read: f64,
    /// Of the GPUs whose tensors go through the CPU's memory.
    pub copies: Vec<Copies>,
    /// Memory of the CPU in which tensors of these may stay.
    pub host_bytes: u64,
    /// It is given out in whole pages of this size.
    pub page_bytes: u64,
    /// So much earlier than it is needed each item has to be back.
    pub margin_s: f64,
    /// For so many times its own way out and back an item has to lie idle.
    pub round_trip_factor: f64,
}

/// An item that leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Leaving {
    /// Its place among the items.
    pub place: usize,
    /// When its way back has to begin at the latest.
    pub start_by_s: f64,
    /// When it has been copied from its GPU; `None` if nothing is known of its copies, or it is on
    /// none.
    pub copied_s: Option<f64>,
    /// Whether it stays in the memory of the CPU.
    pub is_pinned: bool,
}

/// Chooses what leaves of items that are in the order of packing.
///
/// An item that is needed again before it could be brought out and back is left out beforehand. The
/// last of the prefix stay in the memory of the CPU, as far as that goes.
pub fn hidden(items: &[Item], links: &Links) -> Vec<Leaving> {
    let near = |place: &usize| links.lies_idle(&items[*place], false);
    let near: Vec<usize> = (0..items.len()).filter(near).collect();
    let (mut low, mut high) = (0, near.len());
    let mut leaving = Vec::new();
    while low < high {
        let middle = (low + high).div_ceil(2);
        if let Some(fitting) = links.starts(items, links.divided(items, &near[..middle])) {
            leaving = fitting;
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    leaving
}

impl Links {
    fn of(&self, item: &Item) -> Option<&Copies> {
        self.copies.iter().find(|one| Some(one.gpu) == item.gpu)
    }

    /// What the copies of an item's GPU do; those of which nothing is known bound nothing.
    fn copies_of(&self, item: &Item) -> (f64, f64) {
        self.of(item).map_or((f64::INFINITY, f64::INFINITY), |one| (one.down, one.up))
    }

    /// The bytes that an item takes in the memory of the CPU.
    pub fn pages(&self, item: &Item) -> u64 {
        item.nbytes.div_ceil(self.page_bytes) * self.page_bytes
    }

    /// Whether a way out and back leaves enough of the time until an item is needed again.
    fn lies_idle(&self, item: &Item, goes_to_disk: bool) -> bool {
        let (down, up) = self.copies_of(item);
        let nbytes = item.nbytes as f64;
        let mut round_trip_s = nbytes / down + nbytes / up;
        if goes_to_disk || self.of(item).is_none() {
            round_trip_s = round_trip_s + nbytes / self.write + nbytes / self.read;
        }
        item.needed_s - item.packed_s > self.round_trip_factor * round_trip_s + self.margin_s
    }

    /// Which of a prefix leave, and which of these stay in the memory of the CPU. When their ways
    /// back begin is not known yet.
    fn divided(&self, items: &[Item], prefix: &[usize]) -> Vec<Leaving> {
        let mut left_bytes = self.host_bytes;
        let mut leaving = Vec::with_capacity(prefix.len());
        for &place in prefix.iter().rev() {
            let item = &items[place];
            let is_pinned = self.of(item).is_some() && self.pages(item) <= left_bytes;
            if is_pinned {
                left_bytes -= self.pages(item);
            } else if !self.lies_idle(item, true) {
                continue;
            }
            leaving.push(Leaving { place, start_by_s: f64::NAN, copied_s: None, is_pinned });
        }
        leaving.reverse();
        leaving
    }

    /// What leaves, with the latest start of each way back; `None` if the traffic does not fit.
    fn starts(&self, items: &[Item], mut leaving: Vec<Leaving>) -> Option<Vec<Leaving>> {
        let mut copied_s = PerGpu::new(0.0);
        let (mut away_s, mut end_s) = (Vec::with_capacity(leaving.len()), 0.0_f64);
        for one in &mut leaving {
            let item = &items[one.place];
            // Of a GPU whose link is behind, the disk gets a tensor when that has copied it.
            let copied_s = copied_s.of(item.gpu);
            *copied_s = copied_s.max(item.packed_s) + item.nbytes as f64 / self.copies_of(item).0;
            if !one.is_pinned {
                end_s = end_s.max(*copied_s) + item.nbytes as f64 / self.write;
            }
            away_s.push(if one.is_pinned { *copied_s } else { end_s });
            let is_known = self.of(item).is_some_and(|copies| copies.down.is_finite());
            one.copied_s = is_known.then_some(*copied_s);
        }
        let mut order: Vec<usize> = (0..leaving.len()).collect();
        let needed_s = |number: usize| items[leaving[number].place].needed_s;
        order.sort_by(|&one, &other| needed_s(other).total_cmp(&needed_s(one)));
        let (mut upload_s, mut read_s) = (PerGpu::new(f64::INFINITY), f64::INFINITY);
        for number in order {
            let one = &mut leaving[number];
            let item = &items[one.place];
            let upload_s = upload_s.of(item.gpu);
            *upload_s = upload_s.min(item.needed_s - self.margin_s)
                - item.nbytes as f64 / self.copies_of(item).1;
            if !one.is_pinned {
                read_s = read_s.min(*upload_s) - item.nbytes as f64 / self.read;
            }
            one.start_by_s = if one.is_pinned { *upload_s } else { read_s };
            if one.start_by_s < away_s[number] {
                return None;
            }
        }
        // The disk reads and writes by turns.
        (read_s >= end_s).then_some(leaving)
    }
}

/// A moment for each GPU, and one for the CPU.
struct PerGpu {
    first_s: f64,
    known: Vec<(Option<usize>, f64)>,
}

impl PerGpu {
    fn new(first_s: f64) -> Self {
        Self { first_s, known: Vec::new() }
    }

    fn of(&mut self, gpu: Option<usize>) -> &mut f64 {
        let place = self.known.iter().position(|(known, _)| *known == gpu).unwrap_or_else(|| {
            self.known.push((gpu, self.first_s));
            self.known.len() - 1
        });
        &mut self.known[place].1
    }
}
