"""Seats and the bench: validators and jurors come and go at the command line, on real contracts."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_scenario import (
    ACCEPT,
    CHEATER,
    HONEST,
    JURORS,
    OWNER,
    PARAMETERS,
    TOKEN,
    VALIDATORS,
    Person,
    fraud,
    node_of,
    rejected,
)
from journey_stage import Stage, hint, open_stage, undone

from muster.chain import RunTerms
from muster.protocol.encoding import keccak
from muster.protocol.errors import NotYet
from muster.protocol.ids import RunId
from muster.protocol.jury import BENCH

STRANGER = Person(keccak(b"somebody else"))
RUN_ID, RUN = RunId(1), ("--run", "1")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("seats")) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(opened: Stage) -> AsyncIterator[Stage]:
    async with undone(opened) as fresh:
        yield fresh


async def with_tokens(stage: Stage, tokens: int) -> str:
    """Give a stranger gas money and tokens; return its keystore."""
    await stage.scenario.anvil.set_balance(STRANGER.address, TOKEN)
    await stage.scenario.of(OWNER).token.faucet(STRANGER.address, tokens * TOKEN)
    return stage.keep("stranger", STRANGER)


async def invite(stage: Stage, person: Person) -> None:
    await stage.scenario.of(OWNER).runs.invite(RUN_ID, person.address, True)


def words(group: str, command: str, key: str, *more: str) -> tuple[str, ...]:
    run = RUN if group == "validator" else ()
    return (group, command, *run, "--keystore", key, *more)


# Validators


async def test_more_than_is_required_can_be_staked_and_less_cannot(stage: Stage) -> None:
    key = await with_tokens(stage, 600)
    await invite(stage, STRANGER)
    little = await stage.error(*words("validator", "join", key, "--amount", "499", "--yes"))
    assert "499 tokens are too few: 500 are missing" in str(little)
    joined = await stage.json(*words("validator", "join", key, "--amount", "600", "--yes"))
    assert joined["account"] == STRANGER.address
    assert await stage.scenario.of(OWNER).runs.is_validator(RUN_ID, STRANGER.address)
    staked = await stage.scenario.of(OWNER).vault.active_stake(RUN_ID, STRANGER.address)
    assert staked == 600 * TOKEN


async def test_a_seat_is_taken_only_after_a_yes(stage: Stage) -> None:
    key = await with_tokens(stage, 500)
    await invite(stage, STRANGER)
    result = await stage.run(*words("validator", "join", key), run_input="n\n")
    assert result.exit_code == 1
    assert "risk    all of it for two different outcomes of one batch of run 1" in result.stderr
    assert not await stage.scenario.of(OWNER).runs.is_validator(RUN_ID, STRANGER.address)


async def test_who_is_invited_is_told_so_before_it_works_for_the_run(stage: Stage) -> None:
    key, node = await with_tokens(stage, 500), stage.keep("n", node_of(STRANGER))
    await invite(stage, STRANGER)
    join = ("stake", *RUN, "--keystore", key, "--node", node)
    result = await stage.run(*join, run_input="n\n")
    assert "note    this account is invited to validate run 1" in result.stderr
    await stage.json(*words("validator", "join", key, "--yes"))


async def test_who_works_for_a_run_does_not_judge_it(stage: Stage) -> None:
    await invite(stage, HONEST)
    error = await stage.error(*words("validator", "join", stage.key("worker"), "--yes"))
    assert f"{HONEST.address} works for run 1 (active)" in str(error)
    assert "another keystore" in hint(error)


async def test_who_is_banned_from_a_run_does_not_judge_it(stage: Stage) -> None:
    scenario, key = stage.scenario, stage.key("cheater")
    await invite(stage, CHEATER)
    await scenario.of(OWNER).token.faucet(CHEATER.address, 500 * TOKEN)
    submission = scenario.submission(CHEATER, 0)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [fraud(2, submission)])
    proof = await scenario.proof(batch_id, 0)
    await scenario.of(OWNER).ledger.execute_fraud(proof, scenario.held(proof, submission, CHEATER))
    sent = await scenario.rpc.call("eth_getTransactionCount", CHEATER.address, "latest")
    error = await stage.error(*words("validator", "join", key, "--yes"))
    assert f"{CHEATER.address} works for run 1 (banned)" in str(error)
    assert await scenario.rpc.call("eth_getTransactionCount", CHEATER.address, "latest") == sent


async def test_a_nodes_key_takes_no_seat_and_judges_no_case(stage: Stage) -> None:
    await invite(stage, node_of(HONEST))
    for group in ("validator", "juror"):
        error = await stage.error(*words(group, "join", stage.key("node"), "--yes"))
        assert f"is the node of worker {HONEST.address}" in str(error)


async def test_no_seat_is_taken_while_the_terms_are_about_to_change(stage: Stage) -> None:
    key = await with_tokens(stage, 500)
    await invite(stage, STRANGER)
    changed = RunTerms(2 * 10**12, 200_000, 1_000_000, 3)
    await stage.scenario.of(OWNER).runs.propose_change(RUN_ID, changed)
    error = await stage.error(*words("validator", "join", key, "--yes"))
    assert "the terms of run 1 are about to change" in str(error)


async def test_a_validator_that_takes_all_its_stake_back_gives_up_its_seat(stage: Stage) -> None:
    unstake = ("unstake", *RUN, "--keystore", stage.key("validator"), "--yes")
    assert (await stage.json(*unstake))["amount_tokens"] == "500"
    assert not await stage.scenario.of(OWNER).runs.is_validator(RUN_ID, VALIDATORS[0].address)
    assert isinstance(await stage.error(*unstake), NotYet)
    await stage.scenario.pass_time(PARAMETERS.unbonding_s)
    assert (await stage.json(*unstake))["action"] == "withdrawn"


GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "validator.md"
STEPS = ["validator join", "validator leave", "unstake --run"]


async def test_the_guides_lines_take_a_seat_with_room_for_fines_and_give_it_up(
    stage: Stage,
) -> None:
    lines = re.findall(
        r"^muster ((?:validator (?:join|leave)|(?:un)?stake) .*?)(?: \|\|.*)?$",
        GUIDE.read_text(),
        re.M,
    )
    assert [" ".join(line.split()[:2]) for line in lines] == STEPS
    key, owner = await with_tokens(stage, 600), stage.scenario.of(OWNER)
    await invite(stage, STRANGER)
    join, leave, unstake = (line.replace("validator.json", key).split() for line in lines)
    await stage.json(*join)
    assert await owner.vault.active_stake(RUN_ID, STRANGER.address) == 600 * TOKEN
    await stage.json(*leave)
    assert not await owner.runs.is_validator(RUN_ID, STRANGER.address)
    assert isinstance(await stage.error(*unstake), NotYet)
    await stage.scenario.pass_time(PARAMETERS.unbonding_s)
    assert (await stage.json(*unstake))["action"] == "withdrawn"
    # The invitation stays.
    await stage.json(*join)
    assert await owner.runs.is_validator(RUN_ID, STRANGER.address)


async def validator_status(stage: Stage, person: Person) -> Any:
    return await stage.json("validator", "status", *RUN, "--validator", person.address)


async def test_a_validators_status_says_seat_stake_gas_and_what_calls_it(stage: Stage) -> None:
    scenario, me = stage.scenario, VALIDATORS[0]
    found = await validator_status(stage, me)
    assert (found["seated"], found["seats"], found["called"]) == (True, len(VALIDATORS), [])
    assert found["active_wei"] == found["required_wei"] == str(500 * TOKEN)
    assert int(found["gas_wei"]) > int(found["gas_wanted_wei"]) > 0
    batch_id = await scenario.commit([scenario.submission(HONEST, 0)])
    called = [(await validator_status(stage, each))["called"] for each in VALIDATORS]
    assert any(called)
    due_at = (await scenario.view()).batches[batch_id].committed_at + PARAMETERS.outcome_deadline_s
    assert {b["batch"]: b["due_at"] for each in called for b in each} == {batch_id: due_at}
    judged = scenario.submission(HONEST, 1)
    other = await scenario.commit([judged])
    await scenario.post(other, [judged], [rejected(1, judged)])
    assert [(await validator_status(stage, each))["signed"] for each in VALIDATORS] == [1, 1, 0]
    assert (await validator_status(stage, me))["waiting"] == 1
    # What is overdue calls nobody.
    await scenario.pass_time(PARAMETERS.outcome_deadline_s)
    assert (await validator_status(stage, me))["waiting"] == 0


async def test_a_validators_status_says_how_its_stake_comes_back(stage: Stage) -> None:
    key = stage.key("validator")
    leave = await stage.run(*words("validator", "leave", key, "--yes"))
    assert "until then its earlier signatures can still be slashed" in leave.stderr
    assert "then    muster unstake --run 1 --keystore FILE withdraws it" in leave.stderr
    show = ("validator", "status", *RUN, "--keystore", key)
    waits = (await stage.run(*show)).stdout
    assert f"no seat (invited) in run 1 of {len(VALIDATORS) - 1} validators" in waits
    assert "0 tokens, 500 required; 500 unbonding until 20" in waits
    assert "muster unstake" not in waits
    await stage.scenario.pass_time(PARAMETERS.unbonding_s)
    found = (await stage.run(*show)).stdout
    assert "muster unstake --run 1 --keystore FILE withdraws what unbonded" in found


# Jurors


async def status(stage: Stage, person: Person) -> Any:
    return await stage.json("juror", "status", "--juror", person.address)


async def test_a_juror_joins_leaves_and_has_its_stake_back(stage: Stage) -> None:
    key = await with_tokens(stage, 500)
    joined = await stage.run(*words("juror", "join", key, "--yes"))
    assert joined.exception is None, joined.output
    assert "signs   to judge cases of any run that it never validated for" in joined.stderr
    assert "risk    no run can touch it, and a vote costs nothing" in joined.stderr
    assert "risk    with less than 500 tokens left the place on the bench is lost" in joined.stderr
    found = await status(stage, STRANGER)
    assert (found["on_the_bench"], found["bench"]) == (True, len(JURORS) + 1)
    assert found["active_wei"] == str(500 * TOKEN)
    assert "is on the bench" in str(await stage.error(*words("juror", "join", key, "--yes")))
    await stage.json(*words("juror", "leave", key, "--yes"))
    assert "is not on the bench" in str(await stage.error(*words("juror", "leave", key, "--yes")))
    found = await status(stage, STRANGER)
    assert (found["on_the_bench"], found["unbonding_wei"]) == (False, str(500 * TOKEN))
    assert not found["withdrawable"]
    await stage.scenario.pass_time(PARAMETERS.unbonding_s)
    assert (await status(stage, STRANGER))["withdrawable"]
    unstake = ("unstake", "--run", str(BENCH), "--keystore", key, "--yes")
    assert (await stage.json(*unstake))["action"] == "withdrawn"
    balance = await stage.scenario.of(OWNER).token.balance_of(STRANGER.address)
    assert balance == 500 * TOKEN


async def test_who_left_the_bench_comes_back_when_no_case_can_draw_it_any_more(
    stage: Stage,
) -> None:
    key, rpc = await with_tokens(stage, 1000), stage.scenario.rpc
    await stage.json(*words("juror", "join", key, "--yes"))
    await stage.json(*words("juror", "leave", key, "--yes"))
    sent = await rpc.call("eth_getTransactionCount", STRANGER.address, "latest")
    early = await stage.error(*words("juror", "join", key, "--yes"))
    assert isinstance(early, NotYet)
    assert f"{STRANGER.address} left the bench, and can join it again from" in str(early)
    assert await rpc.call("eth_getTransactionCount", STRANGER.address, "latest") == sent
    await stage.scenario.pass_time(PARAMETERS.vote_commit_s + 1)
    await stage.json(*words("juror", "join", key, "--yes"))
    assert (await status(stage, STRANGER))["on_the_bench"]


async def test_anyone_gives_up_the_places_that_jurors_left(stage: Stage) -> None:
    key = await with_tokens(stage, 500)
    shorten = words("juror", "shorten", key, "--yes")
    assert f"{len(JURORS)} places, {len(JURORS)} jurors" in str(await stage.error(*shorten))
    first, last = JURORS[0], JURORS[-1]
    await stage.scenario.of(first).jurors.leave()
    await stage.scenario.pass_time(PARAMETERS.vote_commit_s + 1)
    moved = await stage.run(*shorten)
    assert f"bench   {len(JURORS) - 1} jurors on {len(JURORS)} places" in moved.stderr
    assert (await status(stage, last))["on_the_bench"]
    await stage.scenario.pass_time(PARAMETERS.vote_commit_s + 1)
    await stage.json(*shorten)
    assert "has no empty place" in str(await stage.error(*shorten))
    assert (await status(stage, last))["bench"] == len(JURORS) - 1


async def test_a_juror_needs_the_whole_stake(stage: Stage) -> None:
    key = await with_tokens(stage, 499)
    little = await stage.error(*words("juror", "join", key, "--amount", "499", "--yes"))
    assert "499 tokens are too few: 500 are missing" in str(little)
    poor = await stage.error(*words("juror", "join", key, "--yes"))
    assert "the wallet holds 499 tokens, staking takes 500" in str(poor)
    assert not (await status(stage, STRANGER))["on_the_bench"]


async def test_a_jurors_status_says_what_it_did_earned_and_lost(stage: Stage) -> None:
    scenario = stage.scenario
    before = await stage.run("juror", "status", "--juror", JURORS[0].address)
    assert f"on the bench of {len(JURORS)}" in before.stdout
    assert "drawn for 0, voted in 0, absent in 0" in before.stdout
    submission = scenario.submission(HONEST, 0)
    batch_id = await scenario.commit([submission])
    await scenario.post(batch_id, [submission], [rejected(1, submission)])
    proof = await scenario.proof(batch_id, 0)
    case_id = await scenario.claim(proof, submission, HONEST, ACCEPT)
    drawn = await scenario.draw(case_id)
    voter, absent = drawn[0], drawn[1]
    assert [case["phase"] for case in (await status(stage, voter))["open"]] == ["committing"]
    await scenario.vote(case_id, {each: ACCEPT for each in drawn if each is not absent})
    await scenario.pass_time(PARAMETERS.vote_commit_s + PARAMETERS.vote_reveal_s)
    settled = await stage.run(
        "dispute", "settle", f"{batch_id}:0", "--keystore", stage.key("worker"), "--json"
    )
    assert settled.exception is None, settled.output
    found = await status(stage, voter)
    assert (found["drawn"], found["voted"], found["absent"], found["open"]) == (1, 1, 0, [])
    assert int(found["earned_wei"]) == PARAMETERS.juror_fee
    assert found["slashed_wei"] == "0"
    lost = await status(stage, absent)
    assert (lost["drawn"], lost["voted"], lost["absent"], lost["earned_wei"]) == (1, 0, 1, "0")
    assert int(lost["slashed_wei"]) == 500 * TOKEN * PARAMETERS.absence_ppm // 10**6
    # It had staked no more than is required.
    assert not lost["on_the_bench"]
    page = await stage.run("juror", "status", "--juror", absent.address)
    assert "muster juror join --keystore FILE stakes what is missing" in page.stdout
    assert f"muster unstake --run {BENCH} --keystore FILE takes it back" in page.stdout
    again = await stage.run("dispute", "settle", f"{batch_id}:0", "--keystore", stage.key("worker"))
    assert "nothing was left to do" in again.stderr


@pytest.mark.parametrize("both", [True, False])
async def test_status_of_nobody_or_of_two_is_refused(stage: Stage, both: bool) -> None:
    named = ("--juror", STRANGER.address, "--keystore", stage.key("worker")) if both else ()
    assert "exactly one of --juror and --keystore is needed" in str(
        await stage.error("juror", "status", *named)
    )
