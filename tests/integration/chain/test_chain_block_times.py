"""Transactions on chains with quick and slow blocks, whose fees jump while one waits."""

import asyncio

import pytest

from muster.app.anvil import Anvil
from muster.chain import Chain, SendPolicy
from muster.client.stake import take_from_faucet
from muster.deploy import DeployParameters, deploy_contracts
from muster.lab.endpoints.proxy import RpcProxy
from muster.protocol.eip712 import address_of
from muster.protocol.ids import RunId

KEY = Anvil.key(1)
PURSE = 10**20
DEPOSITS = 3
RUN = RunId(1)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "block_s", [0.25, pytest.param(2.0, marks=SLOW), pytest.param(12.0, marks=SLOW)]
)
async def test_fees_that_jump_delay_and_repeat_nothing(block_s: float) -> None:
    async with Anvil(block_time_s=Anvil.STILL_S) as anvil, RpcProxy(anvil.rpc_url) as proxy:
        deployment = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        account = address_of(KEY)
        async with await Chain.connect(proxy.url, deployment, key=KEY) as chain:
            await take_from_faucet(chain, account, PURSE)
            await chain.token.approve(deployment.contracts["StakeVault"], PURSE)
            before = await chain.rpc.call("eth_getTransactionCount", account, "latest")
            # Ends mining by transaction, too.
            await chain.rpc.call("evm_setIntervalMining", 0)
            mining = asyncio.create_task(mine(proxy, block_s))
            try:
                async with asyncio.timeout(60 + 20 * block_s):
                    receipts = await asyncio.gather(
                        *(chain.vault.deposit(RUN, account, 1) for _ in range(DEPOSITS))
                    )
            finally:
                mining.cancel()
                await asyncio.wait([mining])
            after = await chain.rpc.call("eth_getTransactionCount", account, "latest")
            assert int(after, 16) - int(before, 16) == DEPOSITS
            assert (await chain.vault.account_of(RUN, account)).active_wei == DEPOSITS
            for receipt in receipts:
                found = await chain.rpc.call("eth_getTransactionReceipt", receipt.tx_hash)
                assert int(found["effectiveGasPrice"], 16) <= SendPolicy().highest_fee_wei


async def mine(proxy: RpcProxy, block_s: float) -> None:
    """Mine blocks; before the first, the base fee rises thirtyfold, far above the offered fee."""
    number = 0
    while True:
        await asyncio.sleep(block_s)
        number += 1
        await proxy.mine(base_fee_factor=30.0 if number == 1 else 1.0)
