//! What the account counts of what is held, freed, lent and reserved.

use ssdtrain_core::{Account, Ended, Fate, Passed};

#[test]
fn a_holding_counts_until_it_is_dropped() {
    let account = Account::new();
    let one = account.hold(30);
    let other = account.hold(12);
    assert_eq!(account.held_bytes(), 42);
    drop(one);
    assert_eq!(account.held_bytes(), 12);
    assert_eq!(account.ended(Fate::Kept), Ended { bytes: 30, count: 1 });
    other.set_fate(Fate::Forwarded);
    drop(other);
    assert_eq!(account.held_bytes(), 0);
    assert_eq!(account.ended(Fate::Forwarded), Ended { bytes: 12, count: 1 });
}

#[test]
fn freed_and_kept_bytes_are_alive_lent_and_reserved_ones_are_not() {
    let account = Account::new();
    let (freed, lent) = (account.hold(30), account.hold(12));
    freed.free(Fate::Offloaded);
    lent.lend();
    let (_kept, _room) = (account.hold_shared(7, 5, 5), account.reserve(100));
    assert_eq!(account.alive_peak_bytes(), 42, "30 and 12, before 12 was lent");
    lent.take_back();
    assert_eq!(account.alive_peak_bytes(), 47);
    drop((freed, lent));
    let _more = account.hold(43);
    assert_eq!(account.alive_peak_bytes(), 48);
}

#[test]
fn a_freed_holding_is_offloaded_and_no_longer_held() {
    let account = Account::new();
    let holding = account.hold(8);
    holding.free(Fate::Offloaded);
    holding.free(Fate::Offloaded);
    assert_eq!(account.held_bytes(), 0);
    assert_eq!(account.ended(Fate::Offloaded), Ended::default(), "it has not ended yet");
    drop(holding);
    assert_eq!(account.ended(Fate::Offloaded), Ended { bytes: 8, count: 1 });
    assert_eq!(account.held_bytes(), 0);
}

#[test]
fn bytes_that_were_freed_and_are_used_from_memory_end_as_forwarded() {
    let account = Account::new();
    let holding = account.hold(8);
    holding.free(Fate::Offloaded);
    holding.set_fate(Fate::Forwarded);
    drop(holding);
    assert_eq!(account.ended(Fate::Forwarded), Ended { bytes: 8, count: 1 });
    assert_eq!(account.held_bytes(), 0);
}

#[test]
fn a_reservation_counts_until_it_is_given_back() {
    let account = Account::new();
    let (_held, one, other) = (account.hold(7), account.reserve(30), account.reserve(5));
    one.resize(40);
    assert_eq!((account.held_bytes(), account.reserved_bytes(), one.bytes()), (52, 45, 40));
    one.resize(0);
    assert_eq!((account.held_bytes(), account.reserved_bytes()), (12, 5));
    drop((one, other));
    assert_eq!((account.held_bytes(), account.reserved_bytes()), (7, 0));
    assert_eq!(account.ended(Fate::Kept), Ended::default());
}

#[test]
fn lent_bytes_count_again_once_taken_back() {
    let account = Account::new();
    let holding = account.hold(8);
    holding.lend();
    holding.lend();
    assert_eq!(account.held_bytes(), 0);
    holding.take_back();
    holding.take_back();
    assert_eq!(account.held_bytes(), 8);
    holding.lend();
    drop(holding);
    assert_eq!(account.held_bytes(), 0);
    assert_eq!(account.ended(Fate::Kept), Ended { bytes: 8, count: 1 });
}

#[test]
fn small_tensors_are_counted_each_time() {
    let account = Account::new();
    account.limit_small(30);
    for nbytes in [10, 30, 20] {
        assert!(account.hold_small(7, nbytes, 0).is_some());
    }
    account.note_weight();
    assert_eq!(account.small(), Passed { count: 3, bytes: 60, largest_bytes: 30 });
    assert_eq!(account.weight_count(), 1);
}

#[test]
fn holders_of_one_storage_count_at_most_as_much_as_it() {
    let account = Account::new();
    let first = account.hold_shared(7, 60, 100);
    assert_eq!(account.shared_more_bytes(7, 60, 100), 40);
    let second = account.hold_shared(7, 60, 100);
    let third = account.hold_shared(7, 60, 100);
    assert_eq!(account.held_bytes(), 100);
    drop((first, third));
    assert_eq!(account.held_bytes(), 100, "the last holder holds the whole");
    drop(second);
    assert_eq!(account.held_bytes(), 0);
    assert_eq!(account.ended(Fate::Kept), Ended { bytes: 100, count: 1 });
}

#[test]
fn a_storage_that_shrank_adds_nothing() {
    let account = Account::new();
    let _first = account.hold_shared(7, 60, 100);
    let _second = account.hold_shared(7, 20, 40);
    assert_eq!(account.held_bytes(), 60);
}

#[test]
fn the_peak_is_of_what_is_held_and_what_transfers_hold() {
    let account = Account::new();
    account.limit_small(100);
    drop(account.hold_small(7, 10, 5));
    assert_eq!(account.peak_bytes(), 15);
    let _larger = account.hold_small(7, 14, 0);
    assert_eq!(account.peak_bytes(), 15, "it was more before");
    account.note_peak(2);
    assert_eq!(account.peak_bytes(), 16);
    account.forget_peak();
    account.note_peak(0);
    assert_eq!(account.peak_bytes(), 14);
}

#[test]
fn small_tensors_are_held_only_below_their_limit() {
    let account = Account::new();
    assert!(account.hold_small(7, 1, 0).is_none(), "nobody has set one");
    account.limit_small(100);
    let _large = account.hold(60);
    assert!(account.hold_small(7, 31, 10).is_none());
    let fits = account.hold_small(7, 30, 10);
    assert!(fits.is_some());
    assert!(account.hold_small(7, 30, 10).is_some(), "nothing more of the same storage");
    assert!(account.hold_small(8, 1, 10).is_none());
    assert_eq!(account.held_bytes(), 90);
    assert_eq!(account.small().count, 2, "what was refused is not counted");
    account.limit_small(0);
    assert!(account.hold_small(7, 30, 0).is_none());
}
