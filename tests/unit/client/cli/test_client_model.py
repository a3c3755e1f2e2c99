"""The card of a fetched model, and the changes of its folder that contradict the chain."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.client import model as card, model as fetch
from muster.client.audit.lineage import Ingredient, PolicyLineage
from muster.client.audit.report import RunReport
from muster.client.model import Origin, faults_of, manifest_in, require_free, write_card
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest

RUN = RunId(7)
ALICE, BOB = Address("0x" + "aa" * 20), Address("0x" + "bb" * 20)
REPORT = RunReport(
    run_id=RUN, owner=ALICE, paused=False, quorum=2, validators=(ALICE, BOB, ALICE),
    price_wei="1", funded_wei="1", paid_wei="1", batches=1, judged=1, submitted=1_205,
    accepted=1_200, rejected=3, fraud=2, units=9, checkpoints=(),
)  # fmt: skip


def ingredient(place: int, worker: str, use: str = "offered") -> Ingredient:
    file = hex0x(keccak(b"%d" % place))
    return Ingredient(place, 2, 3, place, file, worker, 1, 10, use, 8, None)


def lineage(*ingredients: Ingredient) -> PolicyLineage:
    return PolicyLineage(RUN, 2, (), ingredients, (), 0)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in {"config.json": b"{}", "model.safetensors": bytes(5_000)}.items():
        (source / name).write_bytes(data)
    return ChunkStore(tmp_path / "store").publish(
        {path.name: path for path in source.iterdir()},
        run_id=RUN,
        version=PolicyVersion(2),
        stream_from=0,
        stream_to=4,
        sign=lambda _root: bytes(65),
    )


def origin(manifest: Manifest) -> Origin:
    return Origin(31337, BOB, REPORT, manifest, "0x" + "22" * 32, "0x" + "33" * 32, {})


# The card


def test_a_card_names_root_workers_and_how_to_check(manifest: Manifest) -> None:
    made = lineage(
        ingredient(0, ALICE),
        ingredient(1, BOB),
        ingredient(2, BOB, "overturned"),
        ingredient(3, ALICE, "repeated"),
    )
    text = write_card(origin(manifest), made)
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert f"| root (lineage) | `{hex0x(manifest.root())}` |" in text
    assert "checked by 2 of 3 validators" in text
    assert "| submissions offered to training | 3 (passed over: 1 repeated) |" in text
    assert "| verdicts in the run | 1,200 accepted, 3 rejected, 2 fraud |" in text
    assert "| accepted by mistake, as a jury found | 1 |" in text
    assert f"| `{BOB}` | 2 | 20 |\n| `{ALICE}` | 1 | 10 |" in text
    assert "muster audit lineage --run 7 --version 2 --evidence ." in text


def test_a_card_of_many_workers_names_the_busiest(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "MOST_WORKERS", 1)
    made = lineage(ingredient(0, ALICE), ingredient(1, BOB), ingredient(2, BOB))
    text = write_card(origin(manifest), made)
    assert BOB in text.split("How to check")[0]
    assert f"`{ALICE}` |" not in text
    assert "1 more in `submissions.json`." in text


def test_the_card_of_a_base_model_says_so(manifest: Manifest) -> None:
    base = replace(manifest, version=PolicyVersion(0), stream_to=0)
    text = write_card(replace(origin(manifest), manifest=base), replace(lineage(), version=0))
    assert "| base model | itself |" in text
    assert "Nothing: this is the base model." in text


# The folder


@pytest.fixture
def folder(tmp_path: Path, manifest: Manifest) -> Path:
    (tmp_path / "source" / fetch.MANIFEST).write_bytes(manifest.to_bytes())
    return tmp_path / "source"


def run_with(root: bytes | None) -> Any:
    checkpoints = {} if root is None else {2: SimpleNamespace(manifest_root=root)}
    return SimpleNamespace(checkpoints=checkpoints)


def test_files_beside_the_version_do_not_matter(folder: Path, manifest: Manifest) -> None:
    (folder / "notes.txt").write_text("mine")
    assert faults_of(folder, run_with(manifest.root())) == []


@pytest.mark.parametrize("damage", ["changed", "longer", "gone"])
def test_every_damaged_file_is_named(folder: Path, manifest: Manifest, damage: str) -> None:
    path = folder / "model.safetensors"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(4_999) + b"x" if damage == "changed" else bytes(5_001))
    assert faults_of(folder, run_with(manifest.root())) == ["model.safetensors is damaged"]


@pytest.mark.parametrize(
    ("run", "fault"),
    [
        (None, "the chain knows no run 7 version 2"),
        (run_with(None), "the chain knows no run 7 version 2"),
        (run_with(bytes(32)), f"the chain has run 7 version 2 as {hex0x(bytes(32))}"),
    ],
)
def test_another_version_than_the_chain_has_is_a_fault(folder: Path, run: Any, fault: str) -> None:
    assert faults_of(folder, run) == [fault]


@pytest.mark.parametrize(("content", "words"), [(None, "there is no"), (b"{}", "is damaged")])
def test_a_folder_that_was_not_fetched_is_refused(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / fetch.MANIFEST).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        manifest_in(tmp_path)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    require_free(tmp_path / "new")
    require_free(tmp_path)
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        require_free(tmp_path)
