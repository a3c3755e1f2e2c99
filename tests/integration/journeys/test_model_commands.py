"""`muster model`: a version from an untrusted relay to an answer, on a chain."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from client_network import Network, open_network

from muster.api import OrchestratorApi
from muster.app.cli import muster
from muster.client.chat import AnswerSettings, Live, Speaker
from muster.client.cli.model import relays_of
from muster.client.model import CARD, MANIFEST, OTHER_CARD, SUBMISSIONS
from muster.protocol.errors import ConfigError, PolicyUnavailable
from muster.protocol.ids import PolicyVersion
from muster.trainer.base_model import WarmStart, build_base_model
from muster.trainer.sft.lineage import LINEAGE

MANNERS = AnswerSettings(8, 0.0, "cpu", "float32")


async def invoke(network: Network, *words: str) -> Result:
    environment = {
        "MUSTER_RPC": network.anvil.rpc_url,
        "MUSTER_DEPLOYMENTS": str(network.folder / "deployments"),
    }
    return await asyncio.to_thread(CliRunner().invoke, muster, ["model", *words], env=environment)


async def fetch(network: Network, out: Path, *words: str) -> Result:
    return await invoke(network, "fetch", "--run", "1", "--out", str(out), *words)


async def test_a_version_is_fetched_described_and_checked(tmp_path: Path) -> None:
    async with open_network(tmp_path) as network:
        await network.publish(PolicyVersion(1))
        out = tmp_path / "model"
        fetched = await fetch(network, out, "--orchestrator", network.orchestrator, "--json")
        facts = json.loads(fetched.stdout)
        root = (await network.view()).runs[1].checkpoints[PolicyVersion(1)].manifest_root
        assert (facts["version"], facts["root"]) == (1, "0x" + root.hex())
        assert {CARD, SUBMISSIONS, MANIFEST} < {path.name for path in out.iterdir()}
        assert not list(tmp_path.glob(".model*"))
        assert json.loads((out / SUBMISSIONS).read_text())["contradictions"] == []

        older = tmp_path / "older"
        await fetch(network, older, "--relay", network.origin, "--version", "0")
        assert "Nothing: this is the base model." in (older / CARD).read_text()

        verified = await invoke(network, "verify", str(out))
        assert (verified.exit_code, verified.exception) == (0, None)
        assert "is run 1 version 1, as published on chain 31337" in verified.stdout
        [weights] = [p for p in out.iterdir() if p.suffix not in (".md", ".muster", ".json")]
        weights.write_bytes(b"other")
        damaged = await invoke(network, "verify", str(out))
        assert f"{weights.name} is damaged" in str(damaged.exception)

        again = await fetch(network, out, "--relay", network.origin)
        assert isinstance(again.exception, ConfigError)
        assert weights.read_bytes() == b"other"


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (("--version", "5"), "run 1 has no version 5", "give --version up to 0, its newest"),
        ((), "no relay to fetch the model from", "--orchestrator URL"),
        (("--relay", "http://127.0.0.1:9"), "no relay delivers", "relays are running"),
    ],
)
async def test_what_cannot_be_fetched_is_said(
    tmp_path: Path, words: tuple[str, ...], said: str, hint: str
) -> None:
    async with open_network(tmp_path) as network:
        refused = await fetch(network, tmp_path / "model", *words)
    assert said in str(refused.exception)
    assert hint in getattr(refused.exception, "hint", "")
    assert not (tmp_path / "model").exists()


async def test_a_public_orchestrator_names_no_relay_in_our_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_inside(_: OrchestratorApi) -> bool:
        return False

    monkeypatch.setattr(OrchestratorApi, "is_inside", is_inside)
    async with open_network(tmp_path) as network:
        asked = {"relay": (), "orchestrator": network.orchestrator}
        relays, connects_to = await relays_of(network.run_id, asked)
        place = (network.anvil.rpc_url, network.folder / "deployments")
        live = Live(network.run_id, relays, connects_to, tmp_path / "models", *place)
        with pytest.raises(PolicyUnavailable):
            await asyncio.to_thread(live.newest)
        out = tmp_path / "model"
        refused = await fetch(network, out, "--orchestrator", network.orchestrator)
        assert isinstance(refused.exception, PolicyUnavailable)
        fetched = await fetch(network, out, "--relay", *relays)
        assert fetched.exit_code == 0, fetched.output


async def test_an_older_version_that_no_relay_keeps_names_the_newest(tmp_path: Path) -> None:
    async with open_network(tmp_path) as network:
        for version in range(1, 8):
            await network.publish(PolicyVersion(version))
        refused = await fetch(
            network, tmp_path / "model", "--relay", network.origin, "--version", "1"
        )
    assert isinstance(refused.exception, PolicyUnavailable)
    assert refused.exception.hint == "relays keep the newest versions; the newest is 7"


async def test_a_readme_and_a_lineage_of_the_models_own_stay(tmp_path: Path) -> None:
    own = (CARD, LINEAGE)
    async with open_network(tmp_path) as network:
        policy = network.run.policy

        def with_own_files(folder: Path, version: PolicyVersion) -> dict[str, Path]:
            files = dict(policy(folder, version))
            for name in own:
                files[name] = next(iter(files.values())).with_name(name)
                files[name].write_text("its own")
            return files

        network.run = replace(network.run, policy=with_own_files)
        await network.publish(PolicyVersion(1))
        await fetch(network, tmp_path / "model", "--relay", network.origin)
        verified = await invoke(network, "verify", str(tmp_path / "model"))
    assert (verified.exit_code, verified.exception) == (0, None)
    assert all((tmp_path / "model" / name).read_text() == "its own" for name in own)
    assert (tmp_path / "model" / OTHER_CARD).read_text().startswith("---")


# Talking


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    build_base_model(made, seed=0, warm_start=WarmStart(steps=2, batch=8))
    return made


def talk(*words: str, lines: str = "") -> Result:
    return CliRunner().invoke(muster, ["model", "chat", *words], input=lines)


def test_prompts_are_answered_one_by_one(folder: Path) -> None:
    said = talk(str(folder), "4181=", "9071=", "--max-tokens", "8", "--sources")
    assert said.exception is None
    lines = said.stdout.splitlines()
    assert len(lines) == 4
    assert lines[1] == lines[3]
    assert lines[1].startswith("this folder does not say")


def test_lines_are_read_until_the_end(folder: Path) -> None:
    said = talk(str(folder), "--max-tokens", "8", lines="4181=\n\n/sources\n/what\n/help\n")
    assert said.exception is None
    assert "does not say" in said.stdout
    assert "unknown command /what: /help lists all" in said.stdout
    assert "no chat template" in said.stderr
    assert talk(str(folder), lines="/exit\n4181=\n").stdout == ""


@pytest.mark.parametrize("words", [(), ("/nowhere/model",), ("--run", "1")])
def test_nothing_to_talk_to_is_said(words: tuple[str, ...]) -> None:
    said = talk(*words)
    assert isinstance(said.exception, ConfigError)
    assert said.exception.hint


def test_an_answer_is_the_same_whichever_way_it_is_asked_for(folder: Path) -> None:
    speaker = Speaker(folder, MANNERS)
    first = "".join(speaker.answer("4181="))
    assert first == "".join(speaker.answer("4181="))
    assert talk(str(folder), "4181=", "--max-tokens", "8").stdout.strip() == first.strip()


def test_what_was_said_before_is_part_of_a_conversation(folder: Path) -> None:
    speaker = Speaker(folder, MANNERS)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    speaker.policy.tokenizer.chat_template = template
    assert speaker.has_template
    asked: list[int] = []
    generate = speaker.policy.model.generate

    def noting(**options: Any) -> Any:
        asked.append(options["input_ids"].shape[1])
        return generate(**options)

    speaker.policy.model.generate = noting
    for _ in range(2):
        list(speaker.answer("41="))
    assert asked[1] > asked[0]


@pytest.fixture
def growing(folder: Path, tmp_path: Path) -> Live:
    """A run whose newest version changes at every look."""
    other = tmp_path / "other"
    build_base_model(other, seed=1, warm_start=WarmStart(steps=2, batch=8))

    class Growing(Live):
        def __init__(self) -> None:
            self.looks = 0

        def newest(self) -> tuple[PolicyVersion, Path]:
            self.looks += 1
            return PolicyVersion(self.looks // 3), (folder, other)[self.looks // 3 % 2]

    return Growing()


def test_a_newer_version_is_taken_before_an_answer(
    growing: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker = Speaker(growing, MANNERS)
    # Looks 1 and 2 are version 0, looks 3 to 5 version 1.
    weights = [float(speaker.policy.model.lm_head.weight.sum()) for _ in range(5)]
    assert weights[0] == weights[1] != weights[2] == weights[4]
    assert capsys.readouterr().err.splitlines() == ["policy 0", "policy 1"]


async def test_a_live_version_is_the_newest_on_chain(tmp_path: Path) -> None:
    async with open_network(tmp_path) as network:
        live = Live(
            network.run_id,
            (network.origin,),
            None,
            tmp_path / "models",
            network.anvil.rpc_url,
            network.folder / "deployments",
        )
        first, _ = await asyncio.to_thread(live.newest)
        await network.publish(PolicyVersion(1))
        second, where = await asyncio.to_thread(live.newest)
    assert (first, second) == (0, 1)
    assert where.is_dir()
