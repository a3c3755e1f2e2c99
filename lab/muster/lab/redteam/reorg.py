"""A30: a reorganisation removes blocks that a reader has already seen.

A real chain is reorganised to random depths between random events; a reader that followed it must
have the same view as one that reads it for the first time.
"""

from contextlib import AsyncExitStack
from random import Random

from muster.app.anvil import Anvil
from muster.chain import Chain, ChainView, EventReader, Poll, apply_poll
from muster.client.stake import take_from_faucet
from muster.deploy import DeployParameters, deploy_contracts
from muster.lab.redteam.gain import Gain
from muster.lab.redteam.stage import Stage
from muster.lab.redteam.trials import Attack, Outcome, Variant
from muster.protocol.eip712 import address_of
from muster.protocol.ids import RunId

TOKEN = 10**18
DEEPEST = 20
PURSE = 1_000_000 * TOKEN


class ReorgChain:
    """A chain, one account that makes events on it, and one reader that follows."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._chain: Chain | None = None
        self._reader: EventReader | None = None
        self.view = ChainView()

    async def open(self) -> None:
        """Start the chain; a second time changes nothing."""
        if self._chain is not None:
            return
        anvil = await self._stack.enter_async_context(Anvil(block_time_s=Anvil.STILL_S))
        deployment = await deploy_contracts(anvil.rpc_url, anvil.key(0), DeployParameters())
        self._chain = await self._stack.enter_async_context(
            await Chain.connect(anvil.rpc_url, deployment, key=anvil.key(1))
        )
        self._account = address_of(anvil.key(1))
        await take_from_faucet(self._chain, self._account, PURSE)
        await self._chain.token.approve(deployment.contracts["StakeVault"], PURSE)
        self._follow_anew()
        # No reorganisation reaches back before this.
        await self._chain.rpc.call("anvil_mine", hex(DEEPEST + 1))

    async def play(self, random: Random) -> Outcome:
        """Make events, read some, remove some by a reorganisation, make others, and compare."""
        await self.open()
        assert self._chain is not None
        assert self._reader is not None
        await self._deposits(random.randint(1, 5), random)
        await self.follow()
        depth = random.randint(1, DEEPEST)
        await self._chain.rpc.call("anvil_reorg", depth, [])
        if random.random() < 0.7:
            await self._deposits(random.randint(1, 3), random)
        rewound_to = (await self.follow()).rewound_to
        fresh = ChainView()
        apply_poll(fresh, await EventReader(self._chain).poll())
        differing = _differing(self.view, fresh)
        if differing:
            # A misled reader would stay misled; the next trial must start with a fresh one.
            self._follow_anew()
        verdict = "UNTOUCHED" if rewound_to is None else "REWOUND"
        # Blocks for the next reorganisation to remove.
        await self._chain.rpc.call("anvil_mine", hex(random.randint(1, DEEPEST)))
        reason = f"differs from a replay in {', '.join(differing)}" if differing else "as replayed"
        return Outcome(not differing, verdict, reason, knobs={"depth": depth})

    def _follow_anew(self) -> None:
        assert self._chain is not None
        self._reader, self.view = EventReader(self._chain), ChainView()

    async def follow(self) -> Poll:
        """Read what is new."""
        assert self._reader is not None
        poll = await self._reader.poll()
        apply_poll(self.view, poll)
        return poll

    async def _deposits(self, count: int, random: Random) -> None:
        assert self._chain is not None
        for _ in range(count):
            await self._chain.vault.deposit(RunId(1), self._account, random.randint(1, TOKEN))

    async def close(self) -> None:
        """End the chain."""
        await self._stack.aclose()


def _differing(one: ChainView, other: ChainView) -> list[str]:
    """Return the names of the facts in which two views differ."""
    names = (name for name in vars(one) if not name.startswith("_"))
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _play(stage: Stage, random: Random) -> Outcome:
    return stage.run(stage.reorg_chain.play(random))


ATTACKS = (
    Attack(
        "A30",
        "the chain reorganises around what was read, signed or paid",
        "readers rewind by block hash; outcomes name the batch's root",
        "hard",
        (Variant("depths of 1 to 20", _play),),
        Gain(saved=0.0),
        time_unit="poll",
    ),
)
