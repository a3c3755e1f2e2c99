from hypothesis import given, strategies as st

from muster.orchestrator.http.crowd import Crowd, place_of
from muster.orchestrator.http.quotas import BodyRoom

Member = tuple[str, str, int]


def filled(*members: Member) -> Crowd[Member]:
    crowd: Crowd[Member] = Crowd()
    for member in members:
        crowd.add(member, *member[:2])
    return crowd


def test_largest_part_of_the_largest_group_leaves_first() -> None:
    one, two, three = ("a", "x", 1), ("b", "x", 2), ("b", "y", 3)
    four = ("b", "y", 4)
    crowd = filled(one, two, three, four)
    assert list(crowd) == [three, four, two, one]
    crowd.remove(three, "b", "y")
    crowd.remove(two, "b", "x")
    assert list(crowd) == [one, four]
    assert (len(crowd), len(crowd.part("b")), len(crowd.part("c", "x"))) == (2, 1, 0)


def test_who_was_heard_of_leaves_after_its_equals() -> None:
    members = [("a", "x", 1), ("a", "x", 2), ("b", "y", 3), ("b", "y", 4)]
    crowd = filled(*members)
    crowd.touch(members[0], "a", "x")
    assert list(crowd) == [members[n] for n in (2, 3, 1, 0)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 3))))
def test_crowd_holds_whom_it_was_given(toggled: list[Member]) -> None:
    crowd: Crowd[Member] = Crowd()
    held: set[Member] = set()
    for member in toggled:
        (crowd.remove if member in held else crowd.add)(member, *member[:2])
        held ^= {member}
        sizes = [sum(m[0] == each[0] for m in held) for each in crowd]
        assert set(crowd) == held
        assert len(crowd) == len(held)
        assert sizes == sorted(sizes, reverse=True)


def test_place_is_what_is_rented_as_one_piece() -> None:
    assert place_of("10.1.2.3") == ("10.1.2.0/24", "10.1.2.3")
    assert place_of("2001:db8:1:2::3") == ("2001:db8:1::/48", "2001:db8:1:2::")
    assert place_of("::ffff:10.1.2.3") == place_of("10.1.2.3")
    assert place_of("local") == ("local", "local")


def test_body_gives_way_that_is_its_signers_oldest_when_that_has_most() -> None:
    room = BodyRoom(10)
    with room.arrival("hostile") as old, room.arrival("hostile") as young:
        room.take(old, 1)
        room.take(young, 8)
        with room.arrival("honest") as honest:
            room.take(honest, 3)
            assert [old.is_dropped, young.is_dropped, honest.is_dropped] == [True, True, False]
            # A released place is free at once, and only once.
            room.take(honest, 7)
            assert not honest.is_dropped
    with room.arrival("honest") as honest:
        room.take(honest, 10)
        assert not honest.is_dropped


def test_body_that_alone_takes_all_room_is_dropped() -> None:
    room = BodyRoom(10)
    with room.arrival("greedy") as greedy:
        room.take(greedy, 11)
        assert greedy.is_dropped


def test_signer_has_only_so_many_bodies_on_their_way() -> None:
    room = BodyRoom(10, most_bodies=2)
    with room.arrival("a") as first, room.arrival("b") as other, room.arrival("a") as second:
        assert not first.is_dropped
        with room.arrival("a") as third:
            dropped = [each.is_dropped for each in (first, second, third, other)]
    assert dropped == [True, False, False, False]
