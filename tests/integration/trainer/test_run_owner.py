"""A run's owner leads it to its end at the command line, on real contracts; strangers cannot.

One run lives through everything in order, as its owner would do it.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_scenario import (
    CHALLENGER,
    HONEST,
    ORCHESTRATOR,
    OWNER,
    PARAMETERS,
    PRICE,
    TOKEN,
    TRAINER,
    VALIDATORS,
    accepted,
    rejected,
)
from journey_stage import Stage, hint, open_stage, undone

from muster.chain import RunTerms
from muster.client.owning import FUND_GAS
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, NotYet
from muster.protocol.ids import PolicyVersion, RunId
from muster.trainer.config import load_recipe

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = RunId(1)
FUNDS = 10 * TOKEN
"""The funds with which the run begins."""
ROOT = Path(__file__).parents[3]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path_factory.mktemp("owner")) as stage:
        stage.keep("owner", OWNER)
        stage.keep("stranger", CHALLENGER)
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(opened: Stage) -> AsyncIterator[Stage]:
    async with undone(opened) as fresh:
        yield fresh


async def owner(stage: Stage, *words: str) -> Any:
    return await stage.json("run", *words, "--keystore", stage.key("owner"), "--yes")


async def refusal(stage: Stage, *words: str, who: str = "owner") -> Any:
    return await stage.error("run", *words, "--keystore", stage.key(who), "--yes")


async def shown(stage: Stage) -> Any:
    return await stage.json("run", "show", "1")


async def state(stage: Stage) -> str:
    return str((await shown(stage))["state"])


# Who may


@pytest.mark.parametrize(
    "words",
    [
        ("pause", "1"),
        ("resume", "1"),
        ("close", "1"),
        ("change", "1", "--quorum", "3"),
        ("change", "1", "--cancel"),
        ("rotate", "1", "--trainer", HONEST.address),
        ("rotate", "1", "--orchestrator", HONEST.address),
        ("invite", "1", CHALLENGER.address),
        ("dismiss", "1", VALIDATORS[0].address),
    ],
    ids=" ".join,
)
async def test_only_the_owner_may(stage: Stage, words: tuple[str, ...]) -> None:
    error = await refusal(stage, *words, who="stranger")
    assert isinstance(error, ConfigError)
    assert str(error) == f"run 1 belongs to {OWNER.address}, not to {CHALLENGER.address}"
    assert "--keystore" in hint(error)


async def test_a_dry_run_says_cost_and_effect_sends_nothing_and_asks_no_password(
    stage: Stage,
) -> None:
    before = await shown(stage)
    words = ("run", "change", "1", "--price", "0.000002", "--keystore", stage.key("owner"))
    (Path(stage.key("owner")).parent / "none").write_text("wrong")
    wrong = ("--password-file", str(Path(stage.key("owner")).parent / "none"))
    found = await stage.json(*words, *wrong, "--dry-run")
    now = await stage.scenario.of(OWNER).now()
    assert abs(found["effective_at"] - now - PARAMETERS.change_delay_s) <= 5
    assert 30_000 < found["gas"] < 300_000
    assert int(found["fee_wei"]) > 0
    assert (await shown(stage)) == before | {"policy": (await shown(stage))["policy"]}
    text = await stage.run(*words, "--dry-run")
    assert "0.000001 becomes 0.000002 tokens per unit" in text.stdout
    assert "in 3 min 20 s" in text.stdout
    assert "for RunRegistry.proposeChange" in text.stdout
    assert "nothing was sent" in text.stderr
    assert max(map(len, text.stdout.splitlines())) <= 80


async def test_the_question_can_be_answered_with_no(stage: Stage) -> None:
    result = await stage.run("run", "close", "1", "--keystore", stage.key("owner"), run_input="n\n")
    assert result.exit_code == 1
    assert "run           1 ends, for good" in result.stderr
    assert await state(stage) == "open"


# Money


async def test_anyone_pays_in_and_an_unfunded_run_says_so(stage: Stage) -> None:
    chain = stage.scenario.of(CHALLENGER)
    await chain.token.faucet(CHALLENGER.address, 3 * TOKEN)
    submission = stage.scenario.submission(HONEST, 0, units=FUNDS // PRICE)
    await stage.scenario.commit([submission])
    assert await state(stage) == "unfunded"
    assert "unfunded" in (await stage.run("run", "list")).stdout
    short = await refusal(stage, "fund", "1", "4", who="stranger")
    assert "holds 3 tokens, 4 are to be paid in" in str(short)
    words = ("run", "fund", "1", "2", "--keystore", stage.key("stranger"))
    rehearsed = await stage.json(*words, "--dry-run")
    paid = await stage.json(*words, "--yes")
    assert paid["gas"] < rehearsed["gas"]
    assert rehearsed["gas"] > FUND_GAS
    assert len(paid["transactions"]) == 2
    assert (await shown(stage))["funds"]["available_wei"] == str(2 * TOKEN)
    assert await state(stage) == "open"


async def test_what_nobody_earned_is_recovered_once(stage: Stage) -> None:
    scenario = stage.scenario
    submissions = [scenario.submission(HONEST, 0), scenario.submission(HONEST, 1)]
    batch_id = await scenario.commit(submissions)
    records = [accepted(1, submissions[0]), rejected(1, submissions[1])]
    await scenario.post(batch_id, submissions, records)
    early = await refusal(stage, "recover", "1")
    assert "nothing of run 1 can be recovered now" in str(early)
    await scenario.pass_time(PARAMETERS.challenge_window_s + 1)
    done = await owner(stage, "recover", "1")
    assert (done["outcomes"], done["amount_wei"]) == (1, str(1000 * PRICE))
    assert (await shown(stage))["funds"]["reserved_wei"] == str(1000 * PRICE)
    assert "nothing of run 1 can be recovered now" in str(await refusal(stage, "recover", "1"))


async def test_a_closed_run_is_reclaimed_in_two_parts(stage: Stage) -> None:
    scenario, token = stage.scenario, stage.scenario.of(OWNER).token
    await scenario.commit([scenario.submission(HONEST, 0, units=1000)])
    assert "run 1 is open" in str(await refusal(stage, "reclaim", "1"))
    assert (await owner(stage, "close", "1"))["available_wei"] == str(FUNDS - 1000 * PRICE)
    assert await state(stage) == "closed"
    for words in (("close",), ("pause",), ("fund",), ("change", "--quorum", "1")):
        error = await refusal(stage, words[0], "1", *words[1:], *(["1"] * (words[0] == "fund")))
        assert "run 1 was closed on" in str(error)
    before = await token.balance_of(OWNER.address)
    asked = await stage.run("run", "reclaim", "1", "--keystore", stage.key("stranger"), "--yes")
    assert f"{OWNER.address}" in asked.stderr
    assert await token.balance_of(OWNER.address) - before == FUNDS - 1000 * PRICE
    early = await refusal(stage, "reclaim", "1")
    assert isinstance(early, NotYet)
    assert "0.001 tokens are set aside for workers, who may claim until" in str(early)
    await scenario.pass_time(await scenario.of(OWNER).escrow.claim_period())
    await owner(stage, "reclaim", "1")
    assert await token.balance_of(OWNER.address) - before == FUNDS
    assert "nothing is left of run 1" in str(await refusal(stage, "reclaim", "1"))


# Pause


async def test_submissions_pause_and_resume(stage: Stage) -> None:
    assert "not paused already" in str(await refusal(stage, "resume", "1"))
    assert (await owner(stage, "pause", "1"))["paused"] is True
    assert await state(stage) == "paused"
    assert "paused already" in str(await refusal(stage, "pause", "1"))
    await owner(stage, "resume", "1")
    assert await state(stage) == "open"


async def test_slashing_pauses_with_evidence_by_who_may(stage: Stage, tmp_path: Path) -> None:
    evidence = tmp_path / "why.txt"
    evidence.write_text("three workers of one driver failed at once")
    words = ("pause", "1", "--slashing", str(evidence))
    stranger = await refusal(stage, *words, who="stranger")
    assert "is neither owner nor orchestrator nor validator of run 1" in str(stranger)
    paused = await stage.json("run", *words, "--keystore", stage.key("validator"), "--yes")
    assert paused["evidence"] == "0x" + keccak(evidence.read_bytes()).hex()
    assert (await shown(stage))["slashing_paused_until"] > 0
    assert "slashes" in (await stage.run("run", "show", "1")).stdout
    again = await refusal(stage, *words)
    assert isinstance(again, NotYet)
    assert "slashing was paused until" in str(again)


# Terms


async def test_terms_change_after_their_delay(stage: Stage) -> None:
    runs = stage.scenario.of(OWNER).runs
    assert "no change of run 1 was announced" in str(await refusal(stage, "change", "1", "--apply"))
    announced = await owner(stage, "change", "1", "--price", "0.000002", "--quorum", "3")
    change = (await shown(stage))["change"]
    assert announced["effective_at"] == change["effective_at"]
    terms, number = await runs.terms_of(RUN)
    assert (terms.quorum, number) == (2, 1)
    early = await refusal(stage, "change", "1", "--apply", who="stranger")
    assert isinstance(early, NotYet)
    assert "the announced terms take effect from" in str(early)
    await stage.scenario.pass_time(PARAMETERS.change_delay_s)
    apply = ("run", "change", "1", "--apply", "--keystore", stage.key("stranger"), "--yes")
    await stage.json(*apply)
    assert await runs.terms_of(RUN) == (RunTerms(2 * PRICE, 100_000, 250_000, 3), 2)
    assert (await shown(stage))["change"] is None


async def test_an_announced_change_is_dropped(stage: Stage) -> None:
    await owner(stage, "change", "1", "--fraud-ppm", "200000")
    await owner(stage, "change", "1", "--cancel")
    assert (await shown(stage))["change"] is None
    assert "no change of run 1" in str(await refusal(stage, "change", "1", "--cancel"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--price", "0.000003"), "the price may become 0.0000005 to 0.000002 tokens"),
        (("--quorum", "4"), "a quorum of 4 of 3 validators is impossible"),
        (("--fraud-ppm", "300000"), "fraud_ppm 300000 is above exact_fraud_ppm 250000"),
        (("--quorum", "2"), "run 1 has these terms already"),
        ((), "run 1 has these terms already"),
    ],
)
async def test_terms_that_cannot_be_are_refused(
    stage: Stage, words: tuple[str, ...], said: str
) -> None:
    error = await refusal(stage, "change", "1", *words)
    assert said in str(error)
    assert hint(error)


# People


async def test_trainer_and_orchestrator_are_replaced(stage: Stage) -> None:
    for role, old in (("trainer", TRAINER), ("orchestrator", ORCHESTRATOR)):
        words = ("rotate", "1", f"--{role}", HONEST.address)
        assert (await owner(stage, *words))["old"] == old.address
        assert (await shown(stage))[role] == HONEST.address
        assert f"is the run's {role} already" in str(await refusal(stage, *words))


async def test_validators_are_invited_take_their_seats_and_are_dismissed(stage: Stage) -> None:
    scenario, account = stage.scenario, CHALLENGER.address
    join = ("validator", "join", "--run", "1", "--keystore", stage.key("stranger"), "--yes")
    early = await stage.error(*join)
    assert str(early) == f"{account} is not invited to run 1"
    assert f"muster run invite 1 {account}" in hint(early)
    await owner(stage, "invite", "1", account)
    assert (await shown(stage))["invited"] == [account]
    assert "is invited already" in str(await refusal(stage, "invite", "1", account))
    poor = await stage.error(*join)
    assert "the wallet holds 0 tokens, staking takes 500" in str(poor)
    await scenario.of(CHALLENGER).token.faucet(account, PARAMETERS.required_validator_stake)
    joined = await stage.run(*join)
    assert joined.exception is None, joined.output
    assert "signs   for a validator's seat in run 1, under its terms 1" in joined.stderr
    assert "risk    at most these 500 tokens, to this run only: 5 % for each batch" in joined.stderr
    assert await seated(stage) == {v.address for v in (*VALIDATORS, CHALLENGER)}
    assert "has a seat in run 1" in str(await stage.error(*join))
    await owner(stage, "dismiss", "1", account)
    assert await seated(stage) == {v.address for v in VALIDATORS}
    assert await scenario.of(OWNER).vault.active_stake(RUN, account) == 500 * TOKEN
    assert "is no validator of run 1" in str(await refusal(stage, "dismiss", "1", account))


async def test_an_invitation_that_is_withdrawn_seats_nobody(stage: Stage) -> None:
    await owner(stage, "invite", "1", CHALLENGER.address)
    await owner(stage, "invite", "1", CHALLENGER.address, "--withdraw")
    assert (await shown(stage))["invited"] == []
    join = ("validator", "join", "--run", "1", "--keystore", stage.key("stranger"), "--yes")
    assert "is not invited" in str(await stage.error(*join))
    again = await refusal(stage, "invite", "1", CHALLENGER.address, "--withdraw")
    assert "is not invited" in str(again)


async def test_a_validator_leaves_by_itself_and_its_stake_unbonds(stage: Stage) -> None:
    leave = ("validator", "leave", "--run", "1", "--keystore", stage.key("validator"), "--yes")
    left = await stage.run(*leave)
    assert left.exception is None, left.output
    assert "unbonds 500 tokens" in left.stderr
    assert await seated(stage) == {v.address for v in VALIDATORS[1:]}
    assert "has no seat in run 1" in str(await stage.error(*leave))


async def seated(stage: Stage) -> set[str]:
    return {v["address"] for v in (await shown(stage))["validators"]}


# End


async def test_a_run_with_its_last_version_is_finished(stage: Stage, tmp_path: Path) -> None:
    scenario = stage.scenario
    recipe = load_recipe(ROOT / "configs" / "demo.toml", steps=1)
    config = scenario.config()
    pinned = replace(config, recipe_hash=keccak(recipe.to_bytes()))
    run_id, _ = await scenario.of(OWNER).runs.create_run(pinned)
    trainer = scenario.of(TRAINER)
    await trainer.runs.publish_checkpoint(run_id, PolicyVersion(0), keccak(b"root 0"))
    path = tmp_path / keccak(recipe.to_bytes()).hex()
    path.write_bytes(recipe.to_bytes())
    words = ("run", "show", str(run_id), "--documents", str(tmp_path))
    assert (await stage.json(*words))["state"] == "unfunded"
    await trainer.runs.publish_checkpoint(run_id, PolicyVersion(1), keccak(b"root 1"))
    assert (await stage.json(*words))["state"] == "finished"
    assert "version 1 of 1" in (await stage.run(*words)).stdout
    assert (await stage.json("run", "show", str(run_id)))["state"] == "unfunded"
    path.write_bytes(b"{}")
    assert "is not the recipe that run 2 pins" in str(await stage.error(*words))
