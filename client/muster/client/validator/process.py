"""A validator process: loads the run's documents and the engine, judges batches, proves that it
did, and makes sure that its outcomes get on chain.
"""

import asyncio
import logging

from muster.chain import Chain
from muster.client.connections import (
    Connected,
    EngineFactory,
    connect,
    load_engine,
    make_engine,
    with_context,
)
from muster.client.preflight import require_fit, warn_of_gas
from muster.client.quantities import format_tokens
from muster.client.run_documents import TASK_SETS, fetch_rules, require_consistent
from muster.client.settings import ValidatorSettings
from muster.client.stake import FAUCET_CHAIN_ID
from muster.client.validator.batches import OtherSources
from muster.client.validator.calls import COMMITTED_SHARE, GAS_SHARE, ShowingDuty, Windows
from muster.client.validator.checking_proofs import CheckingStore
from muster.client.validator.context import ValidatorContext
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.loop import ValidatorLoop, require_seat
from muster.client.validator.records import ConductStore, EvidenceStore, OutcomeJournal
from muster.client.validator.soundness import Soundness, pausing
from muster.lifecycle import run_beside
from muster.protocol.ids import Address, RunId
from muster.wallet import Wallet

FLAWS = "flaws"
"""Subfolder of the state folder for evidence of this validator's own flaws."""

logger = logging.getLogger(__name__)


async def run_validator(
    settings: ValidatorSettings,
    account: Wallet,
    *,
    engine_factory: EngineFactory = make_engine,
    loop_class: type[ValidatorLoop] = ValidatorLoop,
) -> None:
    """Judge until cancelled; raises MusterError when this validator cannot or may not judge."""
    # The journal's lock is taken first; it protects the whole folder from a second process.
    with OutcomeJournal(settings.state_dir) as journal:
        async with connect(settings, account) as connected, FileDecoder() as decoder:
            # Checked before the model is loaded, which may take minutes.
            await connected.read_until(
                settings, lambda: account.address in connected.run.validators
            )
            require_seat(connected.run, account.address)
            await warn_of_little(connected.chain, settings.run, account.address)
            folder = settings.state_dir / TASK_SETS
            rules = await fetch_rules(connected.api, connected.run.config, folder)
            await asyncio.to_thread(require_consistent, rules)
            require_fit(rules.recipe, rules.calibration, settings)
            context = ValidatorContext(
                run_id=settings.run,
                key=account.key,
                domain=connected.domain,
                view=connected.view,
                api=connected.api,
                fetcher=connected.fetcher,
                engine=await load_engine(engine_factory, with_context(settings, rules)),
                rules=rules,
                decoder=decoder,
                journal=journal,
                evidence=EvidenceStore(
                    settings.state_dir / "evidence",
                    rules.calibration,
                    refused_bytes=settings.refused_bytes,
                ),
                poll_s=settings.poll_s,
                file_patience_s=settings.file_patience_s,
                windows=await read_windows(connected.chain),
                now=connected.chain.now,
                checks_everything=settings.checks_everything,
                keep_going=settings.keep_going,
                checked=CheckingStore(settings.state_dir / "checking"),
                conducts=ConductStore(settings.state_dir / "conduct", rules.calibration),
                other_sources=OtherSources(
                    run_id=settings.run,
                    view=connected.view,
                    relays=lambda: connected.relays.urls,
                    own_relays=connected.own_relays,
                    allows_private=connected.chain.chain_id == FAUCET_CHAIN_ID,
                ),
            )
            await _judge(loop_class(context), settings, connected)


async def _judge(loop: ValidatorLoop, settings: ValidatorSettings, connected: Connected) -> None:
    """Run the loop, and beside it proofs of checking, showing on chain, and the chain's
    follower."""
    chain = connected.chain
    pause = pausing(chain, settings.run, chain.me, settings.state_dir / FLAWS)
    loop.soundness = Soundness(loop.find_flaw, pause, clock=loop.context.clock)
    assert loop.checking is not None  # it has a store
    showing = ShowingDuty(loop.context, chain, loop.reader.contents)
    following = connected.follow(settings, loop.on_change)
    await run_beside(loop.run(), loop.checking.run(), showing.run(), following)


async def read_windows(chain: Chain) -> Windows:
    """Return the time windows for outcomes and challenges."""
    return Windows(
        outcome_deadline_s=await chain.ledger.outcome_deadline(),
        challenge_window_s=await chain.ledger.challenge_window(),
    )


async def warn_of_little(chain: Chain, run_id: RunId, account: Address) -> None:
    """Warn if a validator lacks gas for showing outcomes, or stake for its seat."""
    need = "to show outcomes on chain, should the orchestrator keep them"
    await warn_of_gas(chain, account, "show and post", need, share=GAS_SHARE * COMMITTED_SHARE)
    staked = await chain.vault.active_stake(run_id, account)
    required = await chain.runs.required_validator_stake()
    if staked < required:
        logger.warning(
            "stake is below what a validator must hold, anybody may unseat it",
            extra={"holds": format_tokens(staked), "must_hold": format_tokens(required)},
        )
