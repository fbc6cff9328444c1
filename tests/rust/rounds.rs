//! In which order reads are begun, how far ahead, and what becomes of a wrong guess.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use proptest::prelude::*;
use ssdtrain_core::round::{Entry, FORWARD, Heaviest, Item, Plan, next_key};
use ssdtrain_core::rounds::{ORDERS_MAX, Of, Rounds, SharedRound, UNFINISHED_MAX};
use ssdtrain_core::window::{Look, WINDOW_BYTES};

const MIB: u64 = 1 << 20;

/// The bytes of a storage; they are on the disk unless a test says otherwise.
struct Record {
    key: i64,
    nbytes: u64,
    /// Under which name its reads are noted.
    name: String,
    has_handle: Cell<bool>,
    is_in_memory: Cell<bool>,
    /// The read that is under way, for as long as some tensor holds it.
    loading: RefCell<Weak<()>>,
}

/// A saved tensor.
struct Saved {
    name: String,
    record: Rc<Record>,
    round: RefCell<Option<(SharedRound<Weak<Saved>>, usize)>>,
    ahead: RefCell<Option<Rc<()>>>,
}

impl Saved {
    fn round(&self) -> SharedRound<Weak<Saved>> {
        self.round.borrow().as_ref().unwrap().0.clone()
    }

    fn ordinal(&self) -> usize {
        self.round.borrow().as_ref().unwrap().1
    }

    fn is_ahead(&self) -> bool {
        self.ahead.borrow().is_some()
    }
}

/// Packs and unpacks as the hooks do, and notes which reads are begun.
struct Desk {
    rounds: Rounds<Weak<Saved>>,
    begun: Vec<String>,
    refused: Vec<&'static str>,
    finished: Vec<SharedRound<Weak<Saved>>>,
    plans: HashMap<i64, Arc<Plan>>,
    goes_on: bool,
    room_bytes: u64,
    resident_bytes: u64,
    now_s: f64,
}

fn is_dead(entry: &Weak<Saved>) -> bool {
    entry.strong_count() == 0
}

fn look(entry: &Weak<Saved>) -> Look {
    let Some(saved) = entry.upgrade() else { return Look::Settled };
    let record = &saved.record;
    if record.has_handle.get() && record.is_in_memory.get() {
        return Look::Leaving;
    }
    if !record.has_handle.get() || saved.is_ahead() {
        return Look::Settled;
    }
    let joins = record.loading.borrow().strong_count() > 0;
    Look::OnDisk { key: record.key, slot_bytes: record.nbytes, joins }
}

fn give_up(given_up: impl IntoIterator<Item = Of<Weak<Saved>>>) {
    for Of { round, ordinals } in given_up {
        for ordinal in ordinals {
            if let Some(saved) = round.lock().entry(ordinal).upgrade() {
                saved.ahead.take();
            }
        }
    }
}

impl Desk {
    fn new() -> Self {
        Self {
            rounds: Rounds::default(),
            begun: Vec::new(),
            refused: Vec::new(),
            finished: Vec::new(),
            plans: HashMap::new(),
            goes_on: true,
            room_bytes: u64::MAX,
            resident_bytes: 0,
            now_s: 0.0,
        }
    }

    fn pack(&mut self, name: &str, sequence: i64, nbytes: u64) -> Rc<Saved> {
        self.pack_in(FORWARD, name, sequence, nbytes, None)
    }

    fn pack_view(&mut self, name: &str, sequence: i64, of: &Rc<Saved>) -> Rc<Saved> {
        let record = Rc::clone(&of.record);
        self.pack_in(FORWARD, name, sequence, record.nbytes, Some(record))
    }

    fn pack_in(
        &mut self,
        phase: i64,
        name: &str,
        sequence: i64,
        nbytes: u64,
        record: Option<Rc<Record>>,
    ) -> Rc<Saved> {
        let opened = self.rounds.open(phase, phase != FORWARD && self.goes_on, is_dead);
        self.finished.extend(opened.finished);
        let key = next_key(opened.round.lock().signature(), nbytes);
        let is_new = record.is_none();
        let record = record.unwrap_or_else(|| {
            Rc::new(Record {
                key,
                nbytes,
                name: name.to_owned(),
                has_handle: Cell::new(true),
                is_in_memory: Cell::new(false),
                loading: RefCell::default(),
            })
        });
        let (name, round, ahead) = (name.to_owned(), RefCell::default(), RefCell::default());
        let saved = Rc::new(Saved { name, record, round, ahead });
        let joined = (!is_new).then_some(saved.record.key);
        let of = Entry { sequence, nbytes, gpu: Some(1), joined, is_narrow: false };
        let ordinal = opened.round.lock().add(Rc::downgrade(&saved), of, self.now_s);
        *saved.round.borrow_mut() = Some((opened.round, ordinal));
        self.now_s += 1.0;
        saved
    }

    /// Packs one tensor per letter, each word by a node of its own.
    fn packs(&mut self, nodes: &[&str], nbytes: u64) -> HashMap<char, Rc<Saved>> {
        let letters = |(sequence, word): (usize, &&'_ str)| {
            word.chars().map(move |letter| (sequence as i64, letter)).collect::<Vec<_>>()
        };
        let letters: Vec<_> = nodes.iter().enumerate().flat_map(letters).collect();
        let pack = |(sequence, letter): (i64, char)| {
            (letter, self.pack(&letter.to_string(), sequence, nbytes))
        };
        letters.into_iter().map(pack).collect()
    }

    /// The names of the reads that this unpack began.
    fn unpack(&mut self, saved: &Saved) -> String {
        let (round, ordinal) = (saved.round(), saved.ordinal());
        let is_first = !round.lock().is_asked_for();
        let is_predicted = round.lock().is_predicted();
        if is_first || !is_predicted {
            let plan = self.plans.get(&round.lock().signature()).map(Arc::clone);
            let key_on_disk = |one: &Weak<Saved>| {
                let record = &one.upgrade()?.record;
                record.has_handle.get().then_some(record.key)
            };
            self.rounds.predict(&round, plan, key_on_disk);
        }
        round.lock().note_needed(ordinal, saved.record.key, self.now_s);
        saved.ahead.take();
        let before = self.begun.len();
        self.advance(&round, ordinal);
        self.now_s += 1.0;
        self.begun[before..].concat()
    }

    fn advance(&mut self, round: &SharedRound<Weak<Saved>>, ordinal: usize) {
        let Some(given_up) = self.rounds.follow(round, ordinal) else { return };
        give_up(given_up);
        let mut walk = self.rounds.walk(round, self.resident_bytes, self.room_bytes);
        while let Some(ordinal) = self.rounds.next(round, &mut walk, look) {
            let saved = round.lock().entry(ordinal).upgrade().unwrap();
            let is_begun = !self.refused.contains(&saved.name.as_str());
            if is_begun {
                self.begun.push(saved.record.name.clone());
                let under_way = saved.record.loading.borrow().upgrade();
                let loading = under_way.unwrap_or_default();
                *saved.record.loading.borrow_mut() = Rc::downgrade(&loading);
                *saved.ahead.borrow_mut() = Some(loading);
            }
            assert!(self.rounds.note(round, &mut walk, ordinal, is_begun));
        }
    }

    fn unpack_all(&mut self, saved: &HashMap<char, Rc<Saved>>, letters: &str) {
        for letter in letters.chars() {
            self.unpack(&saved[&letter]);
        }
    }

    /// Lets a slow disk's plan say that all reads should begin at `start_by_s` after the first. By
    /// that plan the tensors are needed one second apart, in the reverse of their packing.
    fn slow_plan(&mut self, saved: &[&Rc<Saved>], start_by_s: f64) {
        let keys = || saved.iter().map(|one| one.record.key);
        let plan = Plan {
            needed_s: keys().rev().enumerate().map(|(at, key)| (key, at as f64)).collect(),
            start_by_s: keys().map(|key| (key, start_by_s)).collect(),
            longest_gap_s: 0.0,
        };
        let signature = saved[0].round().lock().signature();
        self.plans.insert(signature, Arc::new(plan));
    }
}

fn words(letters: &str) -> Vec<&str> {
    letters.split("").filter(|one| !one.is_empty()).collect()
}

fn ahead(saved: &HashMap<char, Rc<Saved>>) -> String {
    let mut names: Vec<_> =
        saved.values().filter(|one| one.is_ahead()).map(|one| one.name.as_str()).collect();
    names.sort_unstable();
    names.concat()
}

fn sorted(letters: &str) -> String {
    let mut letters: Vec<_> = letters.chars().collect();
    letters.sort_unstable();
    letters.into_iter().collect()
}

// The order.

#[test]
fn the_first_guess_is_the_reverse_of_the_nodes_and_ascends_in_each() {
    let mut desk = Desk::new();
    let saved = desk.packs(&["ab", "c", "def", "g"], MIB);
    assert_eq!(desk.unpack(&saved[&'g']), "defcab");
    assert_eq!(ahead(&saved), "abcdef");
    for letter in "defcab".chars() {
        assert_eq!(desk.unpack(&saved[&letter]), "");
    }
    assert_eq!(ahead(&saved), "");
}

#[test]
fn a_learned_order_is_the_next_guess() {
    let mut desk = Desk::new();
    let nodes = ["ab", "c", "de"];
    // A gradient penalty reads parts early, a partial backward leaves some out.
    let saved = desk.packs(&nodes, MIB);
    desk.unpack_all(&saved, "cbad");
    drop(saved);
    let again = desk.packs(&nodes, MIB);
    assert_eq!(desk.finished.len(), 1);
    assert_eq!(desk.unpack(&again[&'c']), "bad");
    assert!(!again[&'e'].is_ahead(), "what the last round never asked for is not read ahead");
}

#[test]
fn an_order_is_learned_for_rounds_of_the_same_bytes_only() {
    let mut desk = Desk::new();
    let saved = desk.packs(&["a", "b", "c"], MIB);
    desk.unpack_all(&saved, "abc");
    drop(saved);
    let other = desk.packs(&["a", "b", "c"], 2 * MIB);
    assert_eq!(desk.unpack(&other[&'c']), "ba");
    drop(other);
    let same = desk.packs(&["a", "b", "c"], MIB);
    assert_eq!(desk.unpack(&same[&'a']), "bc");
}

#[test]
fn the_newest_order_counts() {
    let mut desk = Desk::new();
    for order in ["abc", "bca", "cba"] {
        let saved = desk.packs(&["a", "b", "c"], MIB);
        desk.unpack_all(&saved, order);
    }
    let saved = desk.packs(&["a", "b", "c"], MIB);
    assert_eq!(desk.unpack(&saved[&'c']), "ba");
}

#[test]
fn a_repeated_unpack_does_not_change_what_was_learned() {
    let mut desk = Desk::new();
    let saved = desk.packs(&["a", "b", "c"], MIB);
    desk.unpack_all(&saved, "cbacba");
    drop(saved);
    let again = desk.packs(&["a", "b", "c"], MIB);
    assert_eq!(desk.finished[0].lock().needed(), [2, 1, 0]);
    assert_eq!(desk.unpack(&again[&'c']), "ba");
}

#[test]
fn learned_orders_are_bounded() {
    let mut desk = Desk::new();
    let saved = desk.packs(&["a", "b", "c"], MIB);
    desk.unpack_all(&saved, "cab");
    drop(saved);
    for size in 1..=ORDERS_MAX as u64 {
        let saved = desk.packs(&["a", "b", "c"], size);
        desk.unpack_all(&saved, "cab");
    }
    let saved = desk.packs(&["a", "b", "c"], MIB);
    assert_eq!(desk.unpack(&saved[&'c']), "ba", "the order was forgotten");
}

// The window.

#[test]
fn the_window_moves_on_by_what_was_used() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcdefgh"), 10 * MIB);
    assert_eq!(desk.unpack(&saved[&'h']), "gfe");
    assert_eq!(desk.unpack(&saved[&'g']), "d");
    assert_eq!(desk.unpack(&saved[&'f']), "c");
}

#[test]
fn small_reads_are_begun_a_quarter_of_the_window_at_a_time() {
    for (nbytes, first) in [(MIB, 32), (MIB / 4, 64)] {
        let mut desk = Desk::new();
        let saved: Vec<_> = (0..3 * first).map(|at| desk.pack(".", at, nbytes)).collect();
        let counts: Vec<_> = saved.iter().rev().map(|one| desk.unpack(one).len() as i64).collect();
        let (quarter, mut expected) = (first / 4, vec![first]);
        for _ in 0..2 {
            expected.extend((1..quarter).map(|_| 0));
            expected.push(quarter);
        }
        assert_eq!(counts[..expected.len()], expected);
        assert_eq!(counts.iter().sum::<i64>(), 3 * first - 1);
    }
}

#[test]
fn views_of_one_storage_count_once() {
    let mut desk = Desk::new();
    let fused = desk.pack("q", 0, 20 * MIB);
    let views = [desk.pack_view("k", 0, &fused), desk.pack_view("v", 0, &fused)];
    let first = desk.pack("x", 1, MIB);
    assert_eq!(desk.unpack(&first), "qqq");
    assert!(fused.is_ahead() && views.iter().all(|one| one.is_ahead()));
}

#[test]
fn room_bounds_what_is_begun() {
    let mut desk = Desk::new();
    desk.room_bytes = 2 * MIB + MIB / 2;
    let saved = desk.packs(&words("abcdef"), MIB);
    assert_eq!(desk.unpack(&saved[&'f']), "ed");
    desk.room_bytes = 0;
    assert_eq!(desk.unpack(&saved[&'e']), "");
    assert!(saved[&'d'].is_ahead());
    desk.room_bytes = u64::MAX;
    assert_eq!(desk.unpack(&saved[&'d']), "cba");
}

#[test]
fn memory_freed_by_backward_may_be_read_into() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcdefghij"), 10 * MIB);
    desk.resident_bytes = 100 * MIB;
    assert_eq!(desk.unpack(&saved[&'j']), "ihg");
    desk.resident_bytes = 200 * MIB; // something else took memory, and will free it
    assert_eq!(desk.unpack(&saved[&'i']), "f");
    desk.resident_bytes = 90 * MIB;
    assert_eq!(desk.unpack(&saved[&'h']), "e");
    desk.resident_bytes = 45 * MIB;
    assert_eq!(desk.unpack(&saved[&'g']), "dcba");
}

#[test]
fn a_slow_disk_reads_ahead_as_far_as_its_plan_says() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcdefgh"), 20 * MIB);
    let all: Vec<_> = "abcdefgh".chars().map(|letter| &saved[&letter]).collect();
    desk.slow_plan(&all, 1.5);
    assert_eq!(desk.unpack(&saved[&'h']), "g");
    assert_eq!(desk.unpack(&saved[&'g']), "f");
    assert_eq!(desk.unpack(&saved[&'f']), "edcba", "by now the start of all is past");
    desk.unpack_all(&saved, "edcba");
    assert_eq!(desk.unpack(&saved[&'h']), "g", "in a second backward the plan begins anew");
}

#[test]
fn a_storage_with_two_users_is_read_ahead_by_its_plan_too() {
    let mut desk = Desk::new();
    let shared = desk.pack("a", 0, 20 * MIB);
    let other = desk.pack("b", 1, 20 * MIB);
    let second = desk.pack_view("A", 2, &shared);
    let rest = ["c", "d", "e"].map(|name| desk.pack(name, 3, 20 * MIB));
    // Of one node, so they are asked for in this order.
    desk.slow_plan(&[&shared, &other, &rest[0], &rest[1], &rest[2]], -1.0);
    assert_eq!(desk.unpack(&rest[0]), "deaba");
    assert!([&shared, &other, &second, &rest[1], &rest[2]].iter().all(|one| one.is_ahead()));
}

#[test]
fn a_write_that_ends_late_does_not_drop_what_was_begun() {
    // A tensor that the plan would have kept turns up on the disk in the middle of a backward.
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcdef"), 20 * MIB);
    let all: Vec<_> = "abdef".chars().map(|letter| &saved[&letter]).collect();
    desk.slow_plan(&all, -1.0);
    saved[&'c'].record.is_in_memory.set(true);
    assert_eq!(desk.unpack(&saved[&'f']), "edba");
    saved[&'c'].record.is_in_memory.set(false);
    desk.unpack_all(&saved, "edcba");
    assert_eq!(sorted(&desk.begun.concat()), "abcde", "read twice, or never");
}

#[test]
fn writes_that_end_late_do_not_drop_what_the_window_held() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcdefgh"), 10 * MIB);
    let late = |is_in_memory| {
        "fe".chars().for_each(|one| saved[&one].record.is_in_memory.set(is_in_memory));
    };
    late(true);
    assert_eq!(desk.unpack(&saved[&'h']), "gdc");
    late(false);
    desk.unpack_all(&saved, "gfedcba");
    assert_eq!(sorted(&desk.begun.concat()), "abcdefg", "read twice, or never");
}

proptest! {
    /// What is read ahead fits the window, or is one tensor that is larger than it.
    #[test]
    fn the_window_is_respected(sizes in prop::collection::vec(1..3 * WINDOW_BYTES, 1..20)) {
        let mut desk = Desk::new();
        let saved: Vec<_> = sizes
            .iter()
            .enumerate()
            .map(|(at, size)| desk.pack(&format!("{at} "), at as i64, *size))
            .collect();
        for (at, one) in saved.iter().enumerate().rev() {
            prop_assert!(at + 1 == saved.len() || one.is_ahead(), "the next one is not begun");
            desk.unpack(one);
            let waiting: Vec<_> = saved.iter().filter(|one| one.is_ahead()).collect();
            let sum: u64 = waiting.iter().map(|one| one.record.nbytes).sum();
            prop_assert!(sum <= WINDOW_BYTES || waiting.len() == 1);
        }
        prop_assert_eq!(desk.begun.len() + 1, saved.len(), "each is read once but the first");
    }

    #[test]
    fn the_first_guess_holds_for_any_nodes(sizes in prop::collection::vec(1..4_usize, 1..8)) {
        let mut desk = Desk::new();
        let mut nodes: Vec<Vec<_>> = Vec::new();
        for (sequence, size) in sizes.iter().enumerate() {
            let pack = |at| desk.pack(&format!("{sequence}.{at} "), sequence as i64, MIB);
            nodes.push((0..*size).map(pack).collect());
        }
        let expected: Vec<_> = nodes.iter().rev().flatten().collect();
        let names: String = expected[1..].iter().map(|one| one.name.as_str()).collect();
        prop_assert_eq!(desk.unpack(expected[0]), names);
    }
}

// Wrong guesses.

#[test]
fn a_wrong_guess_drops_what_was_skipped() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcdef"), MIB);
    assert_eq!(desk.unpack(&saved[&'f']), "edcba");
    assert_eq!(desk.unpack(&saved[&'b']), "");
    assert_eq!(ahead(&saved), "a");
    assert_eq!(desk.unpack(&saved[&'e']), "dcb", "read again when the order turns back to it");
}

#[test]
fn another_round_drops_the_window_of_this_one() {
    let mut desk = Desk::new();
    let first = desk.packs(&["a", "b", "c"], MIB);
    assert_eq!(desk.unpack(&first[&'c']), "ba");
    let second = desk.packs(&["d", "e"], MIB);
    assert_eq!(desk.unpack(&second[&'e']), "d");
    assert_eq!((ahead(&first), ahead(&second)), (String::new(), "d".to_owned()));
    assert_eq!(desk.unpack(&first[&'b']), "a");
}

#[test]
fn a_region_that_is_computed_again_leaves_the_window_to_the_forward() {
    let mut desk = Desk::new();
    let first = desk.packs(&["a", "b", "c"], MIB);
    assert_eq!(desk.unpack(&first[&'c']), "ba");
    let inner = desk.pack_in(7, "i", 9, MIB, None);
    inner.record.has_handle.set(false);
    assert_eq!(desk.unpack(&inner), "");
    assert_eq!(ahead(&first), "ab");
}

#[test]
fn reads_ahead_can_be_given_up() {
    let mut desk = Desk::new();
    let saved = desk.packs(&["a", "b", "c"], MIB);
    desk.unpack(&saved[&'c']);
    give_up(desk.rounds.clear());
    assert_eq!(ahead(&saved), "");
    assert_eq!(desk.unpack(&saved[&'b']), "a");
}

#[test]
fn the_dead_are_skipped() {
    let mut desk = Desk::new();
    let mut saved = desk.packs(&words("abcde"), MIB);
    saved.remove(&'c');
    assert_eq!(desk.unpack(&saved[&'e']), "dba");
    // Dying while read ahead gives the read up with it.
    saved.remove(&'b');
    assert_eq!(desk.unpack(&saved[&'d']), "");
    assert_eq!(ahead(&saved), "a");
}

#[test]
fn tensors_in_memory_are_not_read() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcde"), MIB);
    saved[&'c'].record.is_in_memory.set(true);
    saved[&'b'].record.has_handle.set(false);
    assert_eq!(desk.unpack(&saved[&'e']), "da");
}

#[test]
fn a_read_that_cannot_begin_does_not_stop_the_others() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abcd"), MIB);
    desk.refused.push("c");
    assert_eq!(desk.unpack(&saved[&'d']), "ba");
    assert!(!saved[&'c'].is_ahead());
}

#[test]
fn a_read_is_given_up_whose_window_was_taken_meanwhile() {
    let mut desk = Desk::new();
    let saved = desk.packs(&words("abc"), MIB);
    let other = desk.packs(&words("de"), MIB);
    let round = saved[&'c'].round();
    desk.unpack(&saved[&'c']);
    give_up(desk.rounds.clear());
    assert!(desk.rounds.follow(&round, saved[&'c'].ordinal()).is_some());
    let mut walk = desk.rounds.walk(&round, 0, u64::MAX);
    let begun = desk.rounds.next(&round, &mut walk, look).unwrap();
    // Between the two a handler of a signal runs another backward.
    desk.pack("x", 9, MIB);
    let last = desk.pack("y", 10, MIB);
    desk.unpack(&last);
    assert!(!desk.rounds.note(&round, &mut walk, begun, true));
    drop(other);
}

// Rounds.

#[test]
fn a_round_ends_when_a_pack_follows_an_unpack() {
    let mut desk = Desk::new();
    let first = desk.packs(&["a", "b"], MIB);
    assert!(first[&'a'].round().is(&first[&'b'].round()));
    desk.unpack_all(&first, "ba");
    let second = desk.packs(&["c"], MIB);
    assert!(!second[&'c'].round().is(&first[&'a'].round()));
    assert!(desk.finished.len() == 1 && desk.finished[0].is(&first[&'a'].round()));
}

#[test]
fn micro_batches_before_one_backward_are_one_round() {
    let mut desk = Desk::new();
    let first = desk.packs(&["a", "b"], MIB);
    let second = [desk.pack("c", 10, MIB), desk.pack("d", 11, MIB)];
    assert!(first[&'a'].round().is(&second[1].round()));
    assert_eq!(desk.unpack(&second[1]), "cba");
}

#[test]
fn packs_inside_a_backward_are_a_round_of_their_own() {
    let mut desk = Desk::new();
    let outer = desk.packs(&["a", "b"], MIB);
    desk.unpack(&outer[&'b']);
    let inner = desk.pack_in(7, "i", 5, MIB, None);
    let second = desk.pack_in(7, "j", 6, MIB, None);
    let other = desk.pack_in(8, "k", 7, MIB, None);
    assert!(inner.round().is(&second.round()));
    assert!(!inner.round().is(&other.round()) && !inner.round().is(&outer[&'a'].round()));
    assert_eq!(inner.round().lock().phase(), 7);
    let orders = [&inner, &outer[&'a']].map(|one| one.round().lock().signature());
    assert_ne!(orders[0], orders[1], "a forward and a backward never share an order");
    // An unpack within the same backward does not end its round: recomputation packs and unpacks.
    desk.unpack(&other);
    assert!(desk.pack_in(8, "l", 8, MIB, None).round().is(&other.round()));
    // But under a bound each region is one.
    desk.goes_on = false;
    assert!(!desk.pack_in(8, "m", 9, MIB, None).round().is(&other.round()));
    assert_eq!(desk.pack("n", 10, MIB).round().lock().phase(), FORWARD);
}

#[test]
fn equal_beginnings_have_equal_keys() {
    let mut desk = Desk::new();
    let first = desk.packs(&["a", "b", "c"], MIB);
    desk.unpack(&first[&'c']);
    let second = desk.packs(&["a", "b"], MIB);
    let key = |saved: &HashMap<char, Rc<Saved>>, letter| saved[&letter].record.key;
    assert_eq!(key(&first, 'a'), key(&second, 'a'));
    assert_eq!(key(&first, 'b'), key(&second, 'b'));
    assert_eq!(key(&first, 'b'), next_key(key(&first, 'a'), MIB));
    assert_ne!(key(&first, 'b'), key(&first, 'c'));
}

#[test]
fn a_round_is_finished_when_all_is_asked_for_or_dead() {
    let mut desk = Desk::new();
    let mut saved = desk.packs(&["a", "b", "c"], MIB);
    desk.unpack_all(&saved, "cb");
    let _later = desk.pack("x", 0, MIB);
    assert!(desk.finished.is_empty());
    assert!(desk.rounds.take_finished(is_dead).is_empty());
    saved.remove(&'a');
    let finished = desk.rounds.take_finished(is_dead);
    assert!(finished.len() == 1 && finished[0].is(&saved[&'b'].round()));
    assert!(desk.rounds.take_finished(is_dead).is_empty());
}

#[test]
fn a_round_whose_older_half_is_dead_is_left() {
    let mut desk = Desk::new();
    let first = desk.pack("a", 0, MIB);
    for _ in 0..5000 {
        drop(desk.pack("b", 1, MIB));
    }
    assert!(desk.pack("c", 2, MIB).round().is(&first.round()), "the oldest lives");
    let round = first.round();
    drop(first);
    for _ in 0..5000 {
        drop(desk.pack("d", 3, MIB));
    }
    assert!(!desk.pack("e", 4, MIB).round().is(&round));
}

#[test]
fn a_finished_round_teaches_the_times_of_its_tensors() {
    let mut desk = Desk::new();
    let mut saved = desk.packs(&["a", "b"], MIB);
    saved.insert('c', desk.pack("c", 2, 5 * MIB));
    saved.remove(&'b');
    desk.unpack_all(&saved, "ca");
    let item = |letter, packed_s, needed_s| {
        let record = &saved[&letter].record;
        Item { key: record.key, nbytes: record.nbytes, packed_s, needed_s, gpu: Some(1) }
    };
    let items = saved[&'a'].round().lock().learned_items();
    assert_eq!(items, [item('a', 0.0, 4.0), item('c', 2.0, 3.0)]);
}

#[test]
fn a_storage_is_needed_when_its_first_user_asks() {
    // Backward meets the users of a storage in reverse: the one packed last asks first.
    let mut desk = Desk::new();
    let first = desk.pack("a", 0, MIB);
    let between = ["b", "c", "d"].map(|name| desk.pack(name, 1, MIB));
    let last = desk.pack_view("A", 4, &first);
    let asked_s = desk.now_s;
    desk.unpack(&last);
    drop(between.iter().map(|one| desk.unpack(one)).collect::<Vec<_>>());
    desk.unpack(&first);
    let items = first.round().lock().learned_items();
    let item = items.iter().find(|item| item.key == first.record.key).unwrap();
    assert!((item.needed_s - asked_s).abs() < f64::EPSILON);
}

#[test]
fn the_node_that_saves_most_is_told() {
    let mut desk = Desk::new();
    let saved = desk.packs(&["a", "bc", "d"], MIB);
    let _view = desk.pack_view("e", 1, &saved[&'b']);
    let expected = Heaviest { nbytes: 2 * MIB, tensor_count: 2, all_bytes: 4 * MIB };
    assert_eq!(saved[&'a'].round().lock().heaviest_node(), expected);
}

#[test]
fn unfinished_rounds_are_bounded() {
    let mut desk = Desk::new();
    let mut kept = Vec::new();
    for _ in 0..3 * UNFINISHED_MAX {
        let saved = desk.packs(&["a", "b"], MIB);
        desk.unpack(&saved[&'b']);
        kept.push(saved);
    }
    for saved in &kept {
        desk.unpack(&saved[&'a']);
    }
    // The newest are watched still, and teach when they end; the last one is current.
    let finished = desk.rounds.take_finished(is_dead);
    assert_eq!(finished.len(), UNFINISHED_MAX);
    assert!(finished.last().unwrap().is(&kept[kept.len() - 2][&'a'].round()));
}
