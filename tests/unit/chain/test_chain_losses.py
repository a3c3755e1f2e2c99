"""The sentence about a worker's losses by fraud: the sum of slashes, and where the stake is."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from muster.chain import ChainView, SlashState, SlashView, loss_of, losses
from muster.chain.structs import Offence
from muster.protocol.ids import Address, Hash32, RunId

CHEATER, OTHER = Address("0x" + "11" * 20), Address("0x" + "22" * 20)
RUN, OTHER_RUN = RunId(1), RunId(2)
TOKEN = 10**18


def slash(number: int, amount: int, before: int, **changes: object) -> SlashView:
    """Return a final slash of some tokens of the cheater's active stake."""
    made = SlashView(
        run_id=RUN,
        owner=CHEATER,
        escrow_id=Hash32(bytes([number]) * 32),
        offence=Offence.FRAUD,
        tag=number,
        amount_wei=amount * TOKEN,
        tx_hash=f"0x{number}",
        block_number=number,
        stake_before=(before * TOKEN, 0),
        taken=(amount * TOKEN, 0),
        batch_id=number,
        position=0,
        state=SlashState.RELEASED,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def view_of(*slashes: SlashView) -> ChainView:
    view = ChainView()
    view.slashes.extend(slashes)
    record = SimpleNamespace(reason=SimpleNamespace(name="TOPLOC_MISMATCH"))
    batches = {s.batch_id: SimpleNamespace(records=[record]) for s in slashes}
    view.batches.update(batches)  # type: ignore[arg-type]
    member = SimpleNamespace(status="Banned")
    view.runs[RUN] = SimpleNamespace(members={CHEATER: member})  # type: ignore[assignment]
    return view


def words(*slashes: SlashView) -> str:
    loss = loss_of(view_of(*slashes), RUN, CHEATER)
    assert loss is not None
    return loss.words(lambda wei: f"{wei / TOKEN:,g}")


def test_frauds_that_found_nothing_are_counted_and_not_listed() -> None:
    taken = [slash(1, 500, 1000), slash(2, 500, 500)]
    assert words(*taken, *(slash(n, 0, 0) for n in range(3, 9))) == (
        "banned; lost 1,000 tokens of 1,000 for toploc_mismatch (0x1, 0x2), burned and insured; "
        "6 later frauds found nothing left"
    )


@pytest.mark.parametrize(
    ("states", "where"),
    [
        ((SlashState.ESCROWED, SlashState.ESCROWED), "held until the verdict is final"),
        (
            (SlashState.RELEASED, SlashState.ESCROWED),
            "burned and insured, 250 tokens held until the verdict is final",
        ),
        ((SlashState.RELEASED, SlashState.RESTORED), "burned and insured, 250 tokens given back"),
    ],
)
def test_where_the_stake_is_follows_from_every_slash(
    states: tuple[SlashState, SlashState], where: str
) -> None:
    first = slash(1, 500, 1000, state=states[0])
    assert words(first, slash(2, 250, 500, state=states[1])).endswith(f"(0x1, 0x2), {where}")


def test_stake_that_was_given_back_is_not_lost() -> None:
    view = view_of(slash(1, 500, 1000, state=SlashState.RESTORED))
    (loss,) = losses(view)
    assert (loss.lost_wei, loss.restored_wei) == (0, 500 * TOKEN)


def test_stake_that_was_added_between_two_slashes_counts() -> None:
    assert "lost 700 tokens of 1,200 for" in words(slash(1, 500, 1000), slash(2, 200, 700))


def test_each_stake_has_one_line_and_another_offence_is_its_reason() -> None:
    elsewhere = slash(4, 10, 100, run_id=OTHER_RUN)
    wrong = slash(3, 10, 100, owner=OTHER, offence=Offence.WRONG_VERDICT, batch_id=None)
    view = view_of(slash(1, 500, 1000), wrong, slash(2, 500, 500), elsewhere)
    first, second, third = losses(view)
    assert (first.run_id, first.owner, first.lost_wei) == (RUN, CHEATER, 1000 * TOKEN)
    assert (second.owner, second.status) == (OTHER, "")
    assert second.reasons == ("wrong_verdict",)
    assert (third.run_id, third.owner, third.lost_wei) == (OTHER_RUN, CHEATER, 10 * TOKEN)
    assert losses(view, OTHER_RUN) == [third]


def test_nobody_lost_who_was_never_slashed_in_that_run() -> None:
    view = view_of(slash(1, 500, 1000))
    assert loss_of(view, RUN, OTHER) is None
    assert loss_of(view, OTHER_RUN, CHEATER) is None
