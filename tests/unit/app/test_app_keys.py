"""The demo's accounts: repeatable, distinct, and never printed with their keys."""

from muster.app.demo.adversary import KINDS
from muster.app.demo.keys import CHEATS, Role, account, cast


def test_the_same_seed_gives_the_same_cast() -> None:
    assert cast(1, honest=2, cheats=("other-model",)) == cast(1, honest=2, cheats=("other-model",))


def test_another_seed_gives_other_accounts() -> None:
    ours, theirs = (cast(seed, honest=2, cheats=()) for seed in (1, 2))
    assert not {a.address for a in ours.accounts} & {a.address for a in theirs.accounts}


def test_all_keys_differ() -> None:
    people = cast(1, honest=3, cheats=("a", "b"), validators=3)
    keys = [a.key for a in people.accounts] + [m.node.key for m in people.members]
    assert len(keys) == len(set(keys)) == 3 + 3 + 1 + 6 * 2


def test_roles_are_as_asked() -> None:
    members = cast(1, honest=2, cheats=("other-model",)).members
    assert [m.role for m in members] == [Role.HONEST, Role.HONEST, Role.RESTARTED, Role.CHEATER]
    assert [m.cheat for m in members] == [None, None, None, "other-model"]


def test_every_kind_of_cheater_has_a_program() -> None:
    assert tuple(KINDS) == CHEATS
    assert len(set(KINDS.values())) == len(CHEATS)


def test_a_printed_account_hides_its_key() -> None:
    someone = account(1, "owner")
    assert someone.key.hex() not in repr(someone)
    assert someone.address in repr(someone)
