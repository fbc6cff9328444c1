"""Which rounds are followed in whole."""

from __future__ import annotations

from ssdtrain.activations.followed import (
    BETWEEN_MAX,
    KINDS_MAX,
    LITTLE_SHARE,
    PRICE_MAX,
    Followed,
)

OPENING, SIGNATURE = 7, 11
SAVED_BYTES = 1000


def whole(followed: Followed, leaving_bytes: int = SAVED_BYTES, signature: int = SIGNATURE) -> None:
    followed.note_whole(OPENING, signature, saved_bytes=SAVED_BYTES, leaving_bytes=leaving_bytes)


def between(followed: Followed, opening: int = OPENING) -> int:
    """Return how many rounds come before one that is followed in whole."""
    count = 0
    while followed.scope(opening) != "whole":
        count += 1
    return count


def test_an_unknown_round_is_followed_in_whole() -> None:
    followed = Followed()
    assert between(followed) == 0
    followed.note_partial(OPENING, SIGNATURE)
    assert between(followed) == 0


def test_ever_more_rounds_come_between_two() -> None:
    followed, counts = Followed(), []
    for _ in range(9):
        whole(followed)
        counts.append(between(followed))
    assert counts == [1, 2, 4, 8, 16, 32, BETWEEN_MAX, BETWEEN_MAX, BETWEEN_MAX]


def test_rounds_of_which_little_leaves_are_skimmed() -> None:
    followed = Followed()
    whole(followed, int(SAVED_BYTES * LITTLE_SHARE))
    assert followed.scope(OPENING) == "skimmed"
    whole(followed, int(SAVED_BYTES * LITTLE_SHARE) + 1)
    assert followed.scope(OPENING) == "partial"


def test_rounds_that_are_too_dear_are_skimmed_and_their_price_is_measured_again() -> None:
    followed, scopes = Followed(), []
    share = SAVED_BYTES // 2
    for _ in range(3):
        whole(followed, share)
        while (scope := followed.scope(OPENING)) != "whole":
            scopes.append(scope)
            if scope == "partial":
                assert followed.note_price(OPENING, PRICE_MAX / 2 + 0.01)
    assert scopes == ["partial", "partial", "skimmed", "partial", *3 * ["skimmed"]]
    whole(followed, share)
    assert followed.scope(OPENING) == "partial"
    assert not followed.note_price(OPENING, PRICE_MAX / 2)
    assert between(followed) == 7
    assert not Followed().note_price(OPENING, 1.0)


def test_a_price_is_for_the_share_that_leaves() -> None:
    followed = Followed()
    whole(followed)
    assert not followed.note_price(OPENING, PRICE_MAX)
    whole(followed, SAVED_BYTES // 10)
    assert followed.note_price(OPENING, PRICE_MAX)


def test_another_round_that_begins_alike_begins_anew() -> None:
    followed = Followed()
    for _ in range(3):
        whole(followed)
        between(followed)
    whole(followed, signature=12)
    assert between(followed) == 1
    whole(followed, signature=12)
    assert between(followed) == 2


def test_a_round_that_packed_something_else_is_followed_in_whole_more_often() -> None:
    followed = Followed()
    for same_count_min in (1, 2, 4, 8):
        for number in range(same_count_min):
            assert followed.scope(OPENING) == "whole", number
            whole(followed)
        assert followed.scope(OPENING) == "partial"
        followed.note_partial(OPENING, SIGNATURE + 1)


def test_kinds_that_come_in_turns_are_all_followed_in_whole_in_the_end() -> None:
    """Else one that is always the partial one would never be planned."""
    for period in (2, 3, 5, 12):
        followed, seen = Followed(), []
        for number in range(40 * period):
            signature = SIGNATURE + (number % period == period - 1)
            scope = followed.scope(OPENING)
            if scope == "whole":
                whole(followed, signature=signature)
            else:
                followed.note_partial(OPENING, signature)
            seen.append((signature, scope))
        assert (SIGNATURE + 1, "whole") in seen[-4 * period :]


def test_the_kinds_that_are_remembered_are_bounded() -> None:
    followed = Followed()
    for opening in range(KINDS_MAX + 1):
        followed.note_whole(opening, SIGNATURE, saved_bytes=1, leaving_bytes=1)
    assert [between(followed, opening) for opening in (0, KINDS_MAX)] == [0, 1]
