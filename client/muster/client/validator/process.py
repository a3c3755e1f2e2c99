"""A validator process: loads the run's documents and the engine, judges batches, proves that it
did, and sees to it that what it signed comes on chain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from muster.chain import Chain, follow
from muster.client.documents import (
    TASK_SETS,
    fetch_calibration,
    fetch_recipe,
    fetch_task_set,
)
from muster.client.preflight import coins_of, gas_money
from muster.client.quantities import format_coins, format_tokens
from muster.client.requirements import require_fit
from muster.client.seat import EngineFactory, Seat, load_engine, make_engine, take_seat
from muster.client.settings import ValidatorSettings
from muster.client.stake import FAUCET_CHAIN_ID
from muster.client.validator.calls import Windows
from muster.client.validator.checking import CheckingDuty, CheckingPlace, CheckingStore
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.elsewhere import Elsewhere
from muster.client.validator.evidence import EvidenceStore
from muster.client.validator.journal import OutcomeJournal
from muster.client.validator.judging import Rules
from muster.client.validator.loop import ValidatorLoop, ValidatorPlace, require_seat
from muster.client.validator.showing import ShowingDuty, ShowingPlace
from muster.client.validator.soundness import Soundness, pausing
from muster.lifecycle import run_beside
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId
from muster.tasks import check_task_set, require_pinned
from muster.wallet import Wallet

FLAWS = "flaws"
"""The folder, in the state folder, of what this validator found wrong with itself."""
MOST_TRIED = 1024
"""Problems among which one of each task type is looked for, and graded, at the start."""

logger = logging.getLogger(__name__)


async def run_validator(
    settings: ValidatorSettings,
    account: Wallet,
    *,
    engine_factory: EngineFactory = make_engine,
    loop_class: type[ValidatorLoop] = ValidatorLoop,
) -> None:
    """Judge until cancelled; raises MusterError when this validator cannot or may not judge."""
    # The first is held by one process at a time, and the folder with it.
    with OutcomeJournal(settings.state_dir) as journal:
        async with take_seat(settings, account, sends=True) as seat, FileDecoder() as decoder:
            # Before the model, which may take minutes to load.
            require_seat(seat.run, account.address)
            await warn_of_little(seat.chain, settings.run, account.address)
            rules = await fetch_rules(seat, settings.state_dir / TASK_SETS)
            require_fit(rules.recipe, rules.calibration, settings)
            place = ValidatorPlace(
                run_id=settings.run,
                key=account.key,
                domain=seat.domain,
                view=seat.view,
                api=seat.api,
                fetcher=seat.fetcher,
                engine=await load_engine(engine_factory, settings),
                rules=rules,
                decoder=decoder,
                journal=journal,
                evidence=EvidenceStore(settings.state_dir / "evidence", rules.calibration),
                poll_s=settings.poll_s,
                file_patience_s=settings.file_patience_s,
                windows=await read_windows(seat.chain),
                now=seat.chain.now,
                checks_everything=settings.checks_everything,
                keep_going=settings.keep_going,
                checking=_checking(settings, account, seat),
                elsewhere=Elsewhere(
                    run_id=settings.run,
                    view=seat.view,
                    relays=seat.relays,
                    allows_private=seat.chain.chain_id == FAUCET_CHAIN_ID,
                ),
            )
            loop = loop_class(place)
            loop.soundness = Soundness(
                loop.find_flaw,
                pausing(seat.chain, settings.run, account.address, settings.state_dir / FLAWS),
                clock=place.clock,
            )
            following = follow(
                seat.chain,
                seat.view,
                poll_s=settings.poll_s,
                confirmations=settings.confirmations,
                on_change=loop.on_change,
            )
            assert place.checking is not None  # just made
            showing = ShowingDuty(_showing_place(place, seat, loop))
            await run_beside(loop.run(), place.checking.run(), showing.run(), following)


def _showing_place(place: ValidatorPlace, seat: Seat, loop: ValidatorLoop) -> ShowingPlace:
    return ShowingPlace(
        run_id=place.run_id,
        key=place.key,
        domain=place.domain,
        view=place.view,
        chain=seat.chain,
        journal=place.journal,
        contents=loop.contents,
        windows=place.windows,
        clock=place.clock,
        poll_s=place.poll_s,
    )


def _checking(settings: ValidatorSettings, account: Wallet, seat: Seat) -> CheckingDuty:
    return CheckingDuty(
        CheckingPlace(
            run_id=settings.run,
            key=account.key,
            domain=seat.domain,
            view=seat.view,
            api=seat.api,
            store=CheckingStore(settings.state_dir / "checking"),
            now=time.time,
            poll_s=settings.poll_s,
        )
    )


async def read_windows(chain: Chain) -> Windows:
    """Return how long the chain gives for outcomes and challenges."""
    return Windows(
        outcome_deadline_s=await chain.ledger.outcome_deadline(),
        challenge_window_s=await chain.ledger.challenge_window(),
    )


async def warn_of_little(chain: Chain, run_id: RunId, account: Address) -> None:
    """Say what a validator will lack: gas to show what it signed, or its seat's stake."""
    held, needed = await coins_of(chain, account), await gas_money(chain, "show")
    if held < needed.wei:
        logger.warning(
            "too little gas money to show outcomes on chain, should the orchestrator keep them",
            extra={"holds": format_coins(held), "once_takes": str(needed)},
        )
    staked = await chain.vault.active_stake(run_id, account)
    required = await chain.runs.required_validator_stake()
    if staked < required:
        logger.warning(
            "stake is below what a validator must hold, anybody may unseat it",
            extra={"holds": format_tokens(staked), "must_hold": format_tokens(required)},
        )


async def fetch_rules(seat: Seat, folder: Path) -> Rules:
    """Return what the run's documents say, the task set kept in `folder`.

    Raises MusterError when nobody can be judged by them.
    """
    config = seat.run.config
    rules = Rules(
        recipe=await fetch_recipe(seat.api, config.recipe_hash),
        task_set=await fetch_task_set(seat.api, config.task_set_hash, folder),
        calibration=await fetch_calibration(seat.api, config.calibration_hash),
    )
    await asyncio.to_thread(require_consistent, rules)
    return rules


def require_consistent(rules: Rules) -> None:
    """Raise ConfigError or TaskError when the documents contradict each other, or a verifier that
    the task set needs is missing here or is not the pinned one: honest workers would be rejected.
    """
    recipe, calibration = rules.recipe, rules.calibration
    if (calibration.proof, calibration.temperature) != (recipe.proof, recipe.sampling.temperature):
        raise ConfigError(
            "the run's calibration was measured under another recipe",
            hint="the run's owner must calibrate again: muster calibrate",
        )
    wanted = recipe.sampling.problems_per_submission
    if len(rules.task_set) < wanted:
        raise ConfigError(
            f"the run's task set has {len(rules.task_set)} problems, a submission needs {wanted}"
        )
    require_pinned(recipe.verifiers)
    some = (rules.task_set[i] for i in rules.task_set.spread(MOST_TRIED))
    one_of_each = {problem.task_type: problem for problem in some}
    check_task_set(one_of_each.values(), allows_judge=recipe.allows_judge)
