"""The table of what is referred to weakly: it finds the living and does not grow with the dead."""

from __future__ import annotations

import weakref

from ssdtrain.activations.weak_table import WeakTable


class Thing:
    pass


def test_the_dead_are_forgotten_and_the_living_stay_in_order() -> None:
    table: WeakTable[Thing] = WeakTable(forget_at_min=8)
    kept = []
    for number in range(1000):
        thing = Thing()
        table.remember(number, weakref.ref(thing))
        if number % 100 == 0:
            kept.append(thing)
        assert len(table) <= max(8, 2 * len(kept) + 1)
    del thing
    assert table.alive() == kept
    assert [number for number, one in table.items() if one() is not None] == [*range(0, 1000, 100)]


def test_many_that_live_are_looked_through_seldom() -> None:
    looked = []

    class Counted(weakref.ref[Thing]):
        def __call__(self) -> Thing | None:
            looked.append(self)
            return super().__call__()

    table: WeakTable[Thing] = WeakTable(forget_at_min=8)
    kept = [Thing() for _ in range(1024)]
    for number, thing in enumerate(kept):
        table.remember(number, Counted(thing))
    assert len(table) == len(kept)
    assert len(looked) <= 2 * len(kept)
