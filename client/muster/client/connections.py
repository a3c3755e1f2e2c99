"""Everything that a worker or validator connects to before its loop starts, and its engine.

The composition of a client process: chain, view, orchestrator, policies. The loops get the parts
and do not know how they are made.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster.api import OrchestratorApi
from muster.api.answers import RunInfo
from muster.chain import Chain, EventReader, RunView, find_run, follow, read_until
from muster.chain.reader import OnChange
from muster.client.chain_facts import HistoryView
from muster.client.settings import EngineSettings, JurorSettings, NodeSettings
from muster.client.sources import Sources
from muster.client.tickets import longest_sample
from muster.client.validator.judging import Rules
from muster.inference import InferenceEngine
from muster.inference.engine import Room
from muster.inference.loading import load_as, load_transformers
from muster.lifecycle import ComputeThread, run_beside
from muster.lifecycle.files import write_durably
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ApiError, ConfigError, StorageError
from muster.shardcast import Fetcher
from muster.shardcast.fetcher import NamedVersions
from muster.shardcast.http_client import require_url
from muster.wallet import Wallet

logger = logging.getLogger(__name__)

NodeT = TypeVar("NodeT", bound=NodeSettings)

EngineFactory = Callable[[EngineSettings], InferenceEngine]
"""Makes the engine; called off the event loop, because it imports torch."""

RENEW_S = 300.0
"""Seconds between two looks at the relays that the orchestrator names."""
RENEW_WITHIN_S = 10.0
"""Longest time in seconds that its answer is waited for."""
LONGEST_CASE_S = 86_400.0
"""Longest silence in seconds of a juror's engine: longer than any jury takes."""
TRANSACTIONS = "transactions.sqlite3"
"""The journal of transactions, in the state folder."""


class RunRelays:
    """The run's relays: those of our settings, or those that its orchestrator names now."""

    def __init__(
        self, given: Sequence[str], ask: Callable[[], Awaitable[RunInfo]], kept: Path
    ) -> None:
        """`ask` returns what the orchestrator says about the run, and raises ApiError. The file
        `kept` holds the relays that it named last, for a start while it does not answer.
        """
        self.urls = tuple(given) or _read_relays(kept)
        self.are_chosen = bool(given)
        """Whether they are those of our settings."""
        self._ask = ask
        self._kept = kept

    async def renew(self) -> tuple[str, ...]:
        """Return the relays, asked again unless they are chosen; those known, perhaps none, while
        there is no good answer.
        """
        if self.are_chosen:
            return self.urls
        try:
            async with asyncio.timeout(RENEW_WITHIN_S):
                named = (await self._ask()).policy_sources
            for url in named:
                require_url(url)
        except (ApiError, ConfigError, TimeoutError) as error:
            logger.debug("the run's relays stay", extra={"error": str(error)})
            return self.urls
        if named and named != self.urls:
            logger.info("the run names its relays", extra={"relays": " ".join(named)})
            self.urls = named
            await self._keep()
        return self.urls

    async def _keep(self) -> None:
        try:
            data = "\n".join(self.urls).encode()
            await asyncio.to_thread(write_durably, self._kept, data)
        except StorageError as error:
            logger.warning("the run's relays are not kept", extra={"error": str(error)})


def _read_relays(kept: Path) -> tuple[str, ...]:
    """Return the relays in a file; none when it is missing or damaged."""
    try:
        return tuple(require_url(url) for url in kept.read_text().splitlines())
    except (OSError, UnicodeDecodeError, ConfigError):
        return ()


@dataclass(frozen=True, slots=True)
class Connected:
    """The connections of a client of one run."""

    chain: Chain
    """Signs with the client's wallet, and journals what it sends."""
    view: HistoryView
    """The view of all chain events."""
    run: RunView
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""
    api: OrchestratorApi
    """The run's orchestrator, asked with the client's signature."""
    fetcher: Fetcher
    """Where policies come from."""
    relays: RunRelays

    async def own_relays(self) -> tuple[str, ...]:
        """Return the relays that may be in a private network: those that an orchestrator names
        only if it is in one itself.
        """
        is_own = self.relays.are_chosen or await self.api.is_inside()
        return self.relays.urls if is_own else ()

    async def open_rooms(self) -> Sources:
        """Return the relays that may be given files and proofs now."""
        return Sources(await self.own_relays(), named=self.relays.urls)

    async def read_until(self, settings: NodeSettings, is_there: Callable[[], bool]) -> None:
        """Read the view on while it lacks what may be on chain but unconfirmed: `read_until`."""
        await read_until(
            self.chain,
            self.view,
            is_there,
            poll_s=settings.poll_s,
            confirmations=settings.confirmations,
        )

    async def follow(self, settings: NodeSettings, on_change: OnChange) -> None:
        """Keep the view and the relays current until cancelled."""
        following = follow(
            self.chain,
            self.view,
            poll_s=settings.poll_s,
            confirmations=settings.confirmations,
            on_change=on_change,
        )
        await run_beside(following, self._keep_relays())

    async def _keep_relays(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.fetcher.renew()


@asynccontextmanager
async def connect(
    settings: NodeSettings, wallet: Wallet, *, named: NamedVersions = lambda _: ()
) -> AsyncIterator[Connected]:
    """Connect to everything; raises ConfigError or ChainError when the run cannot be joined. The
    policy versions in `named` stay on the disk.
    """
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(
            await Chain.connect(
                settings.rpc,
                settings.deployments,
                key=wallet.key,
                journal=settings.state_dir / TRANSACTIONS,
            )
        )
        view = HistoryView()
        reader = EventReader(chain, confirmations=settings.confirmations)
        run = await find_run(chain, reader, view, settings.run, pause_s=settings.poll_s)
        domain = chain.domain("ContributionLedger")
        api = await stack.enter_async_context(
            OrchestratorApi(
                settings.orchestrator,
                key=wallet.key,
                domain=domain,
                audience=lambda: view.runs[run.run_id].config.orchestrator,
            )
        )
        kept = settings.state_dir / f"relays-{settings.run}.txt"
        relays = RunRelays(settings.relay, lambda: api.run_info(settings.run), kept)
        # Not awaited for longer: a worker may have to defend its work against who owns the run.
        await relays.renew()
        fetcher = await stack.enter_async_context(
            Fetcher(
                relays.urls,
                settings.state_dir / "policies",
                named=named,
                # Its own relays may be anywhere; those that an orchestrator names may not.
                connects_to=None if relays.are_chosen else api.connects_to,
                renewed=relays.renew,
            )
        )
        yield Connected(chain, view, run, domain, api, fetcher, relays)


def make_engine(settings: EngineSettings) -> InferenceEngine:
    """Return the engine that settings name."""
    room = room_of(settings)
    is_juror = isinstance(settings, JurorSettings)
    if settings.engine == "transformers" and (
        is_juror or settings.device != "cpu" or len(getattr(settings, "devices", ())) > 1
    ):
        from muster.inference.vllm.engine import ProcessEngine

        # In one interpreter, the calls of several engines would run one at a time. A juror loads
        # policies of any run; one that hangs is stopped with its process. After an error of CUDA
        # only another process can compute.
        # The turn of a case ends what hangs; a CPU may take long for a step.
        silence_s = LONGEST_CASE_S if is_juror else None
        made = load_transformers(settings.threads, room, is_apart=True, silence_s=silence_s)(
            settings.dtype, settings.device
        )
        if is_juror and isinstance(made, ProcessEngine):
            made.start()
        return made
    load = load_as(settings.engine, settings.threads, room, settings.tensor_parallel)
    return load(settings.dtype, settings.device)


def room_of(settings: EngineSettings) -> Room:
    """Return the limits of the engine on its machine."""
    return Room(
        context=settings.context,
        memory_share=settings.memory_share,
        max_rows=settings.max_rows,
        batch_tokens=settings.batch_tokens,
    )


def with_context(settings: NodeT, rules: Rules) -> NodeT:
    """Return settings whose context fits the run's longest sample, unless a context is given: the
    model's own context may be a hundred times longer.
    """
    if settings.context is not None:
        return settings
    longest = longest_sample(rules.recipe, rules.task_set)
    return settings.model_copy(update={"context": longest})


async def load_engine(factory: EngineFactory, settings: EngineSettings) -> InferenceEngine:
    """Return the engine; a stop need not wait until it is made."""
    thread = ComputeThread()
    try:
        return await thread.run(factory, settings)
    finally:
        thread.close()
