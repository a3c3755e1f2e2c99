"""A30: the chain takes back what a reader has already seen.

A real chain is reorganised to random depths between random events; whoever followed it must see
what somebody sees who reads it for the first time.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random

from muster.chain import (
    Anvil,
    Chain,
    ChainView,
    DeployParameters,
    EventReader,
    Poll,
    apply_poll,
    deploy_contracts,
)
from muster.client.stake import take_from_faucet
from muster.devnet.redteam.gain import Gain
from muster.devnet.redteam.stage import Stage
from muster.devnet.redteam.trials import Attack, Outcome, Variant
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ChainError

TOKEN = 10**18
DEEPEST = 20
RETRIES = 20
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
        self._reader = EventReader(self._chain)
        # Nothing before this is ever taken back.
        await self._chain.rpc.call("anvil_mine", hex(DEEPEST + 1))

    async def play(self, random: Random) -> Outcome:
        """Make events, follow some of them, take some back, make others, and compare."""
        await self.open()
        assert self._chain is not None
        assert self._reader is not None
        await self._deposits(random.randint(1, 5), random)
        await self.follow()
        depth = random.randint(1, DEEPEST)
        await self._chain.rpc.call("anvil_reorg", depth, [])
        if random.random() < 0.7:
            await self._deposits(random.randint(1, 3), random)
        rewound, fresh = await self._compare()
        is_same = _facts(self.view) == _facts(fresh)
        verdict = "REWOUND" if rewound else "UNTOUCHED"
        # Room for the next reorganisation.
        await self._chain.rpc.call("anvil_mine", hex(random.randint(1, DEEPEST)))
        return Outcome(is_same, verdict, "equals a replay", knobs={"depth": depth})

    async def follow(self) -> Poll:
        """Read what is new."""
        assert self._reader is not None
        poll = await _poll(self._reader)
        apply_poll(self.view, poll)
        return poll

    async def _compare(self) -> tuple[bool, ChainView]:
        """Return whether something was taken back, and what a new reader of the same blocks sees.

        What was taken back is sent again meanwhile, so the chain may grow between two readers.
        """
        assert self._chain is not None
        rewound = False
        for _ in range(RETRIES):
            mine = await self.follow()
            rewound |= mine.rewound_to is not None
            fresh = ChainView()
            theirs = await _poll(EventReader(self._chain))
            apply_poll(fresh, theirs)
            if mine.head == theirs.head:
                break
        return rewound, fresh

    async def _deposits(self, count: int, random: Random) -> None:
        assert self._chain is not None
        for _ in range(count):
            await self._chain.vault.deposit(self._account, random.randint(1, TOKEN))

    async def close(self) -> None:
        """End the chain."""
        await self._stack.aclose()


async def _poll(reader: EventReader) -> Poll:
    """Return what is new; a chain that changes while it is read is read again, as followers do."""
    for _ in range(RETRIES):
        try:
            return await reader.poll()
        except ChainError:
            await asyncio.sleep(0.2)
    return await reader.poll()


def _facts(view: ChainView) -> list[object]:
    return [value for name, value in sorted(vars(view).items()) if not name.startswith("_")]


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
