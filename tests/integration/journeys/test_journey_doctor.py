"""The doctor on a real network: fit, and unfit for each named reason."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fee_oracles
import numpy as np
import pytest
import pytest_asyncio
from click.testing import CliRunner, Result
from client_network import NODES, TOKEN, WORKERS, Network, open_network, world

from muster.app.cli import muster
from muster.chain import Chain
from muster.client.doctor import Line, State, is_fit, machine, network as doctor_network, to_json
from muster.client.doctor.command import Examination, examine
from muster.client.quantities import format_tokens
from muster.client.stake import stake_offer
from muster.inference import Completion, InferenceEngine, Request, loading
from muster.lab.simulator.machines import EOS
from muster.protocol.eip712 import address_of
from muster.protocol.ids import to_address
from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs
from muster.wallet import save_wallet

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with open_network(tmp_path_factory.mktemp("doctor")) as opened:
        yield opened


@pytest.fixture
def asked(network: Network, tmp_path: Path) -> Examination:
    return Examination(
        run=network.run_id,
        rpc=network.anvil.rpc_url,
        deployments=network.folder / "deployments",
        orchestrator=network.orchestrator,
        state_dir=tmp_path,
    )


def load(_dtype: str, _device: str) -> InferenceEngine:
    return world.HashEngine()  # type: ignore[no-any-return]


async def look(asked: Examination, engines: object = load) -> list[Line]:
    return [line async for line in examine(asked, engines)]  # type: ignore[arg-type]


def find(lines: Sequence[Line], name: str) -> Line:
    [found] = [line for line in lines if line.name == name]
    return found


async def test_a_good_machine_is_fit_and_every_line_has_a_figure(asked: Examination) -> None:
    lines = await look(asked)
    assert is_fit(lines), [line for line in lines if line.state is State.FAIL]
    proof = find(lines, "self-proof")
    assert proof.figure.startswith("accepted: 4 samples")
    # The limit grows with the chunk, whose length the run's beacon decides.
    assert re.search(r"exponent mismatches 0 <= \d", proof.figure)
    assert "tokens outside the margin 0 <= 0" in proof.figure
    names = {line.name for line in lines}
    assert names >= {"cpu", "memory", "disk", "engine", "head", "state", "funds", "clock", "ports"}
    assert all(line.figure for line in lines)
    assert all(line.advice for line in lines if line.state in (State.WARN, State.FAIL))


async def test_each_of_several_devices_is_proven(
    asked: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_needed", lambda *_: 100 << 20)
    made: list[str] = []

    def on(dtype: str, device: str) -> InferenceEngine:
        made.append(device)
        return OtherModel() if device == "cuda:1" else load(dtype, device)

    lines = await look(replace(asked, devices=("cpu", "cuda:1", "cpu")), on)
    assert find(lines, "self-proof cpu").state is State.OK
    # A failure on one device makes the machine unfit.
    assert find(lines, "self-proof cuda:1").state is State.FAIL
    assert not is_fit(lines)
    assert {"cpu", "cuda:1"} <= set(made)
    assert find(lines, "model fits cpu").figure.startswith("200.0 MiB needed")
    assert find(lines, "model fits cuda:1").figure.startswith("100.0 MiB needed")


async def test_without_an_orchestrator_the_rest_is_examined(asked: Examination) -> None:
    lines = await look(replace(asked, orchestrator=None))
    assert is_fit(lines)
    assert find(lines, "orchestrator").state is State.SKIP
    assert not [line for line in lines if line.name == "self-proof"]


class OtherModel(world.HashEngine):  # type: ignore[misc, name-defined]
    """Proves hidden states that the policy does not have."""

    def generate(self, requests: Sequence[Request], **options: Any) -> list[Completion]:
        honest = self.policy_version
        self.policy_version = 99
        try:
            return super().generate(requests, **options)  # type: ignore[no-any-return]
        finally:
            self.policy_version = honest


async def test_an_engine_of_another_model_is_unfit_with_statistics(asked: Examination) -> None:
    lines = await look(asked, lambda _dtype, _device: OtherModel())
    proof = find(lines, "self-proof")
    assert proof.state is State.FAIL
    assert "a validator would answer FRAUD TOPLOC_MISMATCH" in proof.figure
    assert "exponent mismatches" in proof.figure
    assert "do not stake" in proof.advice


class Greedy(world.HashEngine):  # type: ignore[misc, name-defined]
    """Always takes the likeliest token and ignores the seed."""

    def _generate(self, request: Request, proof: ProofRecipe) -> Completion:
        limit = request.max_new_tokens
        tokens: list[int] = []
        while len(tokens) < limit and EOS not in tokens:
            _, logits = self._step((*request.prompt_tokens, *tokens))
            tokens.append(int(np.argmax(logits)))
        hidden = self._recompute(request.prompt_tokens, tokens).hidden_TH
        proofs = build_proofs(hidden, chunk_tokens=proof.chunk_tokens, topk=proof.topk)
        return Completion(tuple(tokens), proofs)


async def test_an_engine_that_ignores_seeds_is_unfit(asked: Examination) -> None:
    proof = find(await look(asked, lambda _dtype, _device: Greedy()), "self-proof")
    assert "SAMPLER_MISMATCH" in proof.figure
    assert "tokens outside the margin" in proof.figure


async def test_a_worker_of_the_run_sees_stake_membership_and_node(
    asked: Examination, network: Network, tmp_path: Path
) -> None:
    save_wallet(tmp_path / "node.json", NODES[0].key, "s", light=True)
    lines = await look(
        replace(asked, worker=WORKERS[0].address, keystore=tmp_path / "node.json", proves=False)
    )
    assert find(lines, "stake").figure.startswith("100 of 100 tokens")
    assert find(lines, "membership").figure.startswith("active")
    assert find(lines, "node").state is State.OK
    assert find(lines, "self-proof").state is State.SKIP


@pytest.mark.parametrize(
    ("key", "state", "figure"),
    [
        (WORKERS[0].key, State.FAIL, "is the worker itself"),
        (NODES[1].key, State.FAIL, "serves 0x"),
        (b"\x05" * 32, State.WARN, "serves no worker"),
    ],
)
async def test_another_keystore_than_the_nodes_is_noticed(
    asked: Examination, tmp_path: Path, key: bytes, state: State, figure: str
) -> None:
    save_wallet(tmp_path / "key.json", key, "s", light=True)
    keystore = tmp_path / "key.json"
    lines = await look(
        replace(asked, worker=WORKERS[0].address, keystore=keystore, orchestrator=None)
    )
    assert find(lines, "node").state is state
    assert figure in find(lines, "node").figure


async def test_a_newcomer_is_told_what_to_send_and_stake(asked: Examination) -> None:
    lines = await look(replace(asked, worker=to_address(b"\x07" * 20), orchestrator=None))
    assert find(lines, "gas").state is State.WARN
    assert re.search(r"send at least [0-9.]+ coins to 0x07", find(lines, "gas").advice)
    advice = find(lines, "tokens").advice
    assert "stakes 100 tokens, or what a ticket takes: --orchestrator URL says" in advice
    assert "muster stake" in find(lines, "membership").advice
    assert is_fit(lines)


async def test_the_doctor_asks_for_the_stake_that_staking_takes(
    asked: Examination, network: Network
) -> None:
    newcomer, joined = to_address(b"\x09" * 20), WORKERS[0].address
    async with await Chain.connect(asked.rpc, asked.deployments) as chain:
        units = 1 + 100 * TOKEN // await chain.ledger.stake_per_unit()
        sampling = SimpleNamespace(max_units=units)
        recipe: Any = SimpleNamespace(sampling=sampling, training=SimpleNamespace(steps=0))
        offer = await stake_offer(
            chain, newcomer, network.run_id, None, with_node=True, recipe=recipe
        )
        about = doctor_network.examine_worker
        lines = [line async for line in about(chain, network.run_id, newcomer, units)]
        working = [line async for line in about(chain, network.run_id, joined, units)]
    taken = format_tokens(offer.amount_wei)
    assert offer.amount_wei > 100 * TOKEN
    advice = find(lines, "tokens").advice
    assert advice == f"send {taken} tokens to {newcomer}: a worker stakes {taken} tokens"
    assert find(working, "stake").state is State.FAIL
    assert find(working, "stake").figure.startswith(f"100 of {taken} tokens")


async def test_a_ticket_of_the_recipe_is_asked_for_when_the_orchestrator_shows_it(
    asked: Examination,
) -> None:
    lines = await look(replace(asked, worker=to_address(b"\x07" * 20), proves=False))
    assert "--orchestrator URL says" not in find(lines, "tokens").advice


async def test_a_node_without_money_is_told_what_it_lacks(
    asked: Examination, network: Network, tmp_path: Path
) -> None:
    save_wallet(tmp_path / "node.json", b"\x0b" * 32, "s", light=True)
    mine = replace(asked, keystore=tmp_path / "node.json", orchestrator=None)
    node = address_of(b"\x0b" * 32)
    line = find(await look(mine), "bond")
    bond = (await network.owner.court.terms()).bond
    assert line.state is State.WARN
    assert f"send a bond of {format_tokens(bond)} tokens" in line.advice
    assert node in line.advice
    await network.owner.token.faucet(node, bond)
    await network.anvil.set_balance(node, fee_oracles.COIN)
    assert find(await look(mine), "bond").state is State.OK


@pytest.mark.parametrize("fake", [fee_oracles.OP_STACK, fee_oracles.ARBITRUM])
async def test_gas_money_for_an_l2_includes_its_data(
    asked: Examination, network: Network, fake: tuple[str, bytes]
) -> None:
    address, code = fake
    worker = to_address(b"\x08" * 20)
    await network.anvil.set_balance(worker, fee_oracles.COIN // 10)
    mine = replace(asked, worker=worker, orchestrator=None)
    plain = find(await look(mine), "gas")
    assert plain.state is State.OK
    assert "L1" not in plain.figure
    async with fee_oracles.placed(network.owner, code, address):
        found = find(await look(mine), "gas")
    assert found.state is State.WARN
    assert "of it for data on its L1" in found.figure
    assert "before staking" in found.advice


async def test_a_jailed_worker_is_unfit_and_told_the_way_back(
    asked: Examination, network: Network
) -> None:
    async with await Chain.connect(asked.rpc, asked.deployments, key=WORKERS[1].key) as chain:
        await chain.vault.request_unbond(network.run_id, TOKEN)
    lines = await look(replace(asked, worker=WORKERS[1].address, orchestrator=None))
    assert find(lines, "stake").advice == "muster stake --run 1 --keystore FILE --amount 1"
    assert find(lines, "membership").figure.startswith("jailed until")
    assert not is_fit(lines)


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"run": 9}, "state", "there is no run 9"),
        ({"rpc": "http://127.0.0.1:9"}, "connection", "127.0.0.1:9"),
        ({"orchestrator": "http://127.0.0.1:9"}, "orchestrator", "no answer"),
        ({"relays": ("http://127.0.0.1:9",)}, "ports", "no connection to 127.0.0.1:9"),
        ({"relays": ("http://[::1",)}, "ports", "no connection to http://[::1"),
        ({"relays": ("http://127.0.0.1:99999",)}, "ports", "no connection to 127.0.0.1:99999"),
        ({"relays": ("nonsense",)}, "bandwidth", "no relay delivers"),
        ({"relays": ("http://\x1b[31mred",)}, "bandwidth", "no relay delivers"),
    ],
)
async def test_what_is_not_there_makes_unfit_with_a_reason(
    asked: Examination, changes: dict[str, object], name: str, says: str
) -> None:
    lines = await look(replace(asked, **changes))  # type: ignore[arg-type]
    line = find(lines, name)
    assert (line.state, says in line.figure) == (State.FAIL, True)
    assert line.advice
    assert to_json(lines)["fit"] is False


async def test_a_full_disk_makes_unfit(asked: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "FREE_BYTES", 1 << 60)
    lines = await look(replace(asked, orchestrator=None))
    assert find(lines, "disk").state is State.FAIL


async def test_a_policy_that_is_not_the_chains_is_never_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_network, "RELAY_WAIT_S", 0)
    # A network of its own: an origin whose files were changed stops serving them for good.
    async with open_network(tmp_path) as spoilt:
        for path in (tmp_path / "origin").rglob("*"):
            if path.is_file() and path.read_bytes() == b"policy 0":
                path.write_bytes(b"policy 7")
        lines = await look(
            Examination(
                run=spoilt.run_id,
                rpc=spoilt.anvil.rpc_url,
                deployments=tmp_path / "deployments",
                orchestrator=spoilt.orchestrator,
                state_dir=tmp_path / "doctor",
            )
        )
    assert not is_fit(lines)
    assert find(lines, "bandwidth").state is State.FAIL
    assert not [line for line in lines if line.name == "self-proof"]


async def test_the_examination_holds_no_key_and_sends_nothing(
    asked: Examination, network: Network
) -> None:
    counts = [
        await network.owner.rpc.call("eth_getTransactionCount", wallet.address, "latest")
        for wallet in WORKERS
    ]
    await look(replace(asked, worker=WORKERS[0].address))
    assert counts == [
        await network.owner.rpc.call("eth_getTransactionCount", wallet.address, "latest")
        for wallet in WORKERS
    ]


async def doctor(asked: Examination, *words: str) -> Result:
    chain = ("--rpc", asked.rpc, "--deployments", str(asked.deployments))
    flags = ("--run", str(asked.run), "--state-dir", str(asked.state_dir), *chain)
    return await asyncio.to_thread(CliRunner().invoke, muster, ["doctor", *flags, *words])


async def test_the_command_says_fit_and_ends_with_0(
    asked: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_transformers", lambda *_: load)
    assert asked.orchestrator is not None
    result = await doctor(asked, "--orchestrator", asked.orchestrator)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "fit"
    partly = await doctor(asked)
    assert "fit, as far as it was examined: no self-proof" in partly.stdout


async def test_the_command_says_unfit_why_and_ends_with_1(
    asked: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_transformers", lambda *_: lambda *_: Greedy())
    assert asked.orchestrator is not None
    result = await doctor(asked, "--orchestrator", asked.orchestrator)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "unfit: proof self-proof"
    report = await doctor(asked, "--orchestrator", asked.orchestrator, "--json")
    assert report.exit_code == 1
    found = json.loads(report.stdout)
    assert found["fit"] is False
    assert "SAMPLER_MISMATCH" in found["why"][0]
