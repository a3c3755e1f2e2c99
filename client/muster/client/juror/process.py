"""A juror process: follows the chain, votes in the cases that draw it, whatever run they are of."""

from __future__ import annotations

import logging

from muster.chain import Chain, EventReader, apply_poll, follow
from muster.client.chain_facts import HistoryView
from muster.client.connections import TRANSACTIONS, EngineFactory, load_engine, make_engine
from muster.client.juror.duty import JurorDuty, JurorPlace, VoteJournal
from muster.client.juror.judging import CaseJudge
from muster.client.preflight import warn_of_gas
from muster.client.settings import JurorSettings
from muster.client.stake import FAUCET_CHAIN_ID
from muster.client.validator.decoding import FileDecoder
from muster.lifecycle import run_beside
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address
from muster.wallet import Wallet

logger = logging.getLogger(__name__)


async def run_juror(
    settings: JurorSettings, account: Wallet, *, engine_factory: EngineFactory = make_engine
) -> None:
    """Sit in cases until cancelled; raises MusterError when this account is not on the bench."""
    # The first is held by one process at a time, and the folder with it.
    with VoteJournal(settings.state_dir) as votes:
        async with (
            await Chain.connect(
                settings.rpc,
                settings.deployments,
                key=account.key,
                journal=settings.state_dir / TRANSACTIONS,
            ) as chain,
            FileDecoder() as decoder,
        ):
            view = HistoryView()
            reader = EventReader(chain, confirmations=settings.confirmations)
            apply_poll(view, await reader.poll())
            require_place(view, account.address)
            await warn_of_gas(chain, account.address, "vote", "to vote: absent jurors are slashed")
            judge = CaseJudge(
                view=view,
                key=account.key,
                domain=chain.domain("ContributionLedger"),
                engine=await load_engine(engine_factory, settings),
                decoder=decoder,
                folder=settings.state_dir,
                sources=settings.source,
                relays=settings.relay,
                allows_private=chain.chain_id == FAUCET_CHAIN_ID,
            )
            place = JurorPlace(
                juror=account.address,
                chain=chain,
                view=view,
                judge=judge,
                journal=votes,
                results=settings.state_dir / "cases",
                terms=await chain.court.terms(),
                poll_s=settings.poll_s,
            )
            following = follow(
                chain, view, poll_s=settings.poll_s, confirmations=settings.confirmations
            )
            logger.info("on the bench", extra={"jurors": len(view.jurors())})
            await run_beside(JurorDuty(place).run(), following)


def require_place(view: HistoryView, account: Address) -> None:
    """Raise ConfigError unless an account is on the bench, or open cases may still draw it."""
    held = [place for place in view.bench if place.juror == account]
    opened = [case for case in view.cases.values() if not case.closed]
    if any(not place.left_at for place in held):
        return
    if any(place.is_eligible(case.opened_at) for place in held for case in opened):
        return
    raise ConfigError(
        f"{account} is not on the network's bench",
        hint="muster juror join puts it there; is this the right keystore?",
    )
