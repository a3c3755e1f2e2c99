"""Publication: chunks before the root, exactly once with any chain; and resumption."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from trainer_fakes import KEY, FakeRoots, make_recipe, no_sleep

from muster.protocol.eip712 import Domain, address_of, digest, recover
from muster.protocol.encoding import keccak
from muster.protocol.errors import (
    ChainUnreachable,
    ConfigError,
    ContractRevert,
    RpcError,
    StorageError,
    TransactionLost,
)
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import Checkpoint
from muster.shardcast import ChunkStore, manifest as manifests, state_hash
from muster.trainer.config import TrainerSettings
from muster.trainer.learn.learner import Learner
from muster.trainer.process import _Assembly
from muster.trainer.publish.policies import BASE, PolicyShelf, policy_files
from muster.trainer.publish.publisher import Publisher
from muster.trainer.recover.checkpoint import Checkpoints, Identity, Saved, TrainerState
from muster.trainer.recover.collapse import Guard
from muster.trainer.recover.recovery import catch_up, provide_base_model
from muster.trainer.stream.reader import Cursor

RUN = RunId(5)
DOMAIN = Domain(31337, Address("0x" + "11" * 20))
V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)
NO_ROOT = Hash32(bytes(32))
LOST = TransactionLost("no receipt", tx="0x00", is_remembered=True)


class KilledError(Exception):
    """The process ends here."""


@pytest.fixture
def shelf(model_folder: Path, tmp_path: Path) -> PolicyShelf:
    """A shelf with the base model and three versions."""
    made = PolicyShelf(tmp_path / "policies")
    made.adopt(model_folder)
    for version in (V1, V2, V3):
        made.write(version, {n: w + version for n, w in made.weights(BASE).items()})
    return made


@pytest.fixture
def store(tmp_path: Path) -> ChunkStore:
    """The origin's store."""
    return ChunkStore(tmp_path / "store")


def _publisher(store: ChunkStore, policy_roots: FakeRoots) -> Publisher:
    return Publisher(store, policy_roots, run_id=RUN, domain=DOMAIN, key=KEY, sleep=no_sleep)


def _delta_publisher(
    store: ChunkStore, policy_roots: FakeRoots, *, anchor_every: int = 8
) -> Publisher:
    return Publisher(
        store,
        policy_roots,
        run_id=RUN,
        domain=DOMAIN,
        key=KEY,
        anchor_every=anchor_every,
        sleep=no_sleep,
    )


async def test_published_version_is_stored_signed_and_anchored(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    policy_roots = FakeRoots()
    root = await _publisher(store, policy_roots).publish(V1, shelf.path(V1), 3, 7)
    manifest = store.manifest(RUN, V1)
    assert manifest is not None
    assert (manifest.root(), manifest.stream_from, manifest.stream_to) == (root, 3, 7)
    assert policy_roots.roots == {V1: root}
    assert manifest.state_hash == state_hash(policy_files(shelf.path(V1)))
    signature = store.signature(RUN, V1)
    assert signature is not None
    message = digest(DOMAIN, Checkpoint(RUN, V1, root).struct_hash())
    assert recover(message, signature) == address_of(KEY)


async def test_published_version_takes_no_disk_space_of_its_own(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    await _publisher(store, FakeRoots()).publish(V1, shelf.path(V1), 0, 2)
    published = store.folder / "runs" / str(RUN) / str(V1) / "files"
    assert all((published / n).samefile(path) for n, path in policy_files(shelf.path(V1)).items())
    # Made again after a restart it is another file; the published one stays as it was.
    shelf.write(V1, shelf.weights(V2))
    manifest = store.manifest(RUN, V1)
    assert manifest is not None
    assert state_hash({path.name: path for path in published.iterdir()}) == manifest.state_hash


async def test_publishing_again_sends_nothing(shelf: PolicyShelf, store: ChunkStore) -> None:
    policy_roots = FakeRoots()
    publisher = _publisher(store, policy_roots)
    first = await publisher.publish(V1, shelf.path(V1), 0, 2)
    assert await publisher.publish(V1, shelf.path(V1), 0, 2) == first
    assert policy_roots.sent == [V1]


async def test_small_change_is_published_as_a_delta(
    model_folder: Path, store: ChunkStore, tmp_path: Path
) -> None:
    shelf = PolicyShelf(tmp_path / "bf16", dtype="bfloat16")
    shelf.adopt(model_folder)
    publisher = _delta_publisher(store, FakeRoots(), anchor_every=2)
    for version in (V1, V2, V3):
        weights = {n: w * (1 + version * 1e-5) for n, w in shelf.weights(BASE).items()}
        await publisher.publish(version, shelf.write(version, weights), version, version)
    first, second, third = (store.manifest(RUN, version) for version in (V1, V2, V3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [(m.kind, m.parent) for m in (first, second, third)] == [
        ("full", None),
        ("full", V1),
        ("delta", V2),
    ]
    assert third.broadcast_bytes < third.total_bytes / 4
    assert third.state_hash == state_hash(policy_files(shelf.path(V3)))
    # A trainer that lost its folder reads the files from the store, also after deltas.
    fresh = PolicyShelf(tmp_path / "fresh", dtype="bfloat16")
    fresh.adopt(model_folder)
    assert catch_up(None, {V3: third.root()}, store, fresh, RUN) is not None
    assert state_hash(policy_files(fresh.path(V3))) == third.state_hash


def _barely_trained(shelf: PolicyShelf, model_folder: Path, *versions: int) -> PolicyShelf:
    """Put the base model, and versions that differ little from it, on a shelf."""
    shelf.adopt(model_folder)
    for version in versions:
        weights = {n: w * (1 + version * 1e-5) for n, w in shelf.weights(BASE).items()}
        shelf.write(PolicyVersion(version), weights)
    return shelf


async def _publish_all(publisher: Publisher, shelf: PolicyShelf, *versions: int) -> None:
    for version in versions:
        await publisher.publish(PolicyVersion(version), shelf.path(PolicyVersion(version)), 0, 0)


async def test_manifest_has_room_for_a_delta_of_half_the_files(
    shelf: PolicyShelf, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "DEFAULT_CHUNK_BYTES", 1024)
    monkeypatch.setattr(manifests, "MOST_CHUNKS", 10)
    await _publish_all(_publisher(store, FakeRoots()), shelf, 0)
    manifest = store.manifest(RUN, BASE)
    assert manifest is not None
    assert manifest.chunk_bytes // 2 < 0.15 * manifest.total_bytes <= manifest.chunk_bytes


async def test_lost_store_is_made_again_from_the_state_folder(
    model_folder: Path, store: ChunkStore, tmp_path: Path
) -> None:
    shelf = PolicyShelf(tmp_path / "bf16", dtype="bfloat16")
    _barely_trained(shelf, model_folder, 1, 2, 3, 4)
    roots, fresh = FakeRoots(), ChunkStore(tmp_path / "fresh")
    await _publish_all(_delta_publisher(store, roots), shelf, 0, 1, 2, 3)
    # The chain's endpoint does not answer at first.
    roots.unreachable = 2
    await _publish_all(_delta_publisher(fresh, roots), shelf, 2, 3, 4)
    assert roots.sent == [0, 1, 2, 3, 4]
    for version in (V2, V3):
        assert fresh.manifest(RUN, version) == store.manifest(RUN, version)
        assert fresh.is_complete(RUN, version)
    last = fresh.manifest(RUN, PolicyVersion(4))
    assert last is not None
    assert (last.kind, last.parent) == ("delta", V3)


async def test_version_0_comes_back_to_a_lost_store_with_what_starts_from_it(
    model_folder: Path, store: ChunkStore, tmp_path: Path
) -> None:
    shelf = PolicyShelf(tmp_path / "bf16", dtype="bfloat16")
    _barely_trained(shelf, model_folder, 1)
    roots, fresh = FakeRoots(), ChunkStore(tmp_path / "fresh")
    await _publish_all(_delta_publisher(store, roots), shelf, 0, 1)
    await _publish_all(_delta_publisher(fresh, roots), shelf, 1)
    assert fresh.versions(RUN) == [1, 0]
    assert roots.sent == [0, 1]


async def test_state_that_contradicts_the_chain_leaves_nothing_in_a_lost_store(
    model_folder: Path, store: ChunkStore, tmp_path: Path
) -> None:
    shelf = PolicyShelf(tmp_path / "bf16", dtype="bfloat16")
    _barely_trained(shelf, model_folder, 1, 2, 3)
    roots, fresh = FakeRoots(), ChunkStore(tmp_path / "fresh")
    await _publish_all(_delta_publisher(store, roots), shelf, 0, 1, 2)
    shelf.write(V2, shelf.weights(V3))
    with pytest.raises(StorageError, match="version 2 is on chain as") as caught:
        await _publish_all(_delta_publisher(fresh, roots), shelf, 2)
    assert "--store" in (caught.value.hint or "")
    assert fresh.stored_versions(RUN) == []


@pytest.mark.parametrize(
    ("errors", "sent"),
    [
        ([(ChainUnreachable("gone"), False)], 2),
        ([(LOST, False), (ChainUnreachable("gone"), False)], 3),
        ([(RpcError("internal error", code=-32603), False)], 2),
        ([(ContractRevert("RunUnknown", (1,)), False)], 2),
        ([(LOST, True)], 1),  # it did arrive, and is found before it is sent again
    ],
)
async def test_publication_survives_the_chain(
    shelf: PolicyShelf, store: ChunkStore, errors: list[tuple[Exception, bool]], sent: int
) -> None:
    policy_roots = FakeRoots(errors=errors)
    root = await _publisher(store, policy_roots).publish(V1, shelf.path(V1), 0, 2)
    assert policy_roots.roots == {V1: root}
    assert len(policy_roots.sent) == sent


async def test_refused_publication_is_reported(shelf: PolicyShelf, store: ChunkStore) -> None:
    policy_roots = FakeRoots(errors=[(ContractRevert("RunUnauthorized"), False)])
    with pytest.raises(ContractRevert, match="RunUnauthorized"):
        await _publisher(store, policy_roots).publish(V1, shelf.path(V1), 0, 2)


async def test_version_is_never_published_with_other_content(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    policy_roots = FakeRoots(roots={V1: keccak(b"other")})
    with pytest.raises(StorageError, match="version 1 is on chain as"):
        await _publisher(store, policy_roots).publish(V1, shelf.path(V1), 0, 2)
    assert policy_roots.sent == []


async def _stored_and_made_anew(shelf: PolicyShelf, store: ChunkStore, roots: FakeRoots) -> Hash32:
    """Store version 1, which the chain does not take, and make it again with other weights; returns
    its former root.
    """
    roots.errors = [(ContractRevert("RunUnauthorized"), False)]
    with pytest.raises(ContractRevert):
        await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    shelf.write(V1, shelf.weights(V3))
    manifest = store.manifest(RUN, V1)
    assert manifest is not None
    return manifest.root()


async def test_stored_version_gives_way_to_the_same_step_s_other_result(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    roots = FakeRoots(roots={BASE: keccak(b"base")})
    former = await _stored_and_made_anew(shelf, store, roots)
    root = await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    assert roots.roots[V1] == root != former
    manifest = store.manifest(RUN, V1)
    assert manifest is not None
    assert manifest.root() == root
    assert manifest.state_hash == state_hash(policy_files(shelf.path(V1)))


@pytest.mark.parametrize("found", ["anchored", "on its way", "a later one"])
async def test_stored_version_stays_where_the_chain_may_have_it(
    shelf: PolicyShelf, store: ChunkStore, found: str
) -> None:
    roots = FakeRoots()
    former = await _stored_and_made_anew(shelf, store, roots)
    if found == "on its way":
        roots.coming = {V1: former}
    else:
        roots.roots = {V2 if found == "a later one" else V1: former}
    with pytest.raises(StorageError, match="published with other content"):
        await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    manifest = store.manifest(RUN, V1)
    assert manifest is not None
    assert manifest.root() == former


@dataclass
class OvertakenRoots(FakeRoots):
    """Roots that first mine another transaction for the version, which no journal remembers."""

    first: Hash32 = NO_ROOT

    async def publish(self, version: PolicyVersion, root: Hash32) -> None:
        self.roots.setdefault(version, self.first)
        await super().publish(version, root)


def _stored_versions(store: ChunkStore) -> list[tuple[str, Hash32]]:
    """Return the whole content of the run's folder: names and roots."""
    manifests = {v: store.manifest(RUN, v) for v in store.versions(RUN)}
    roots = {str(v): m.root() for v, m in manifests.items() if m is not None}
    folder = store.folder / "runs" / str(RUN)
    return [(each.name, roots.get(each.name, NO_ROOT)) for each in folder.iterdir()]


@pytest.mark.parametrize(
    "error", [ContractRevert("RunVersionNotIncreasing", (5, 1, 1)), ChainUnreachable("gone")]
)
async def test_replaced_version_comes_back_when_the_chain_takes_it_after_all(
    shelf: PolicyShelf, store: ChunkStore, error: Exception
) -> None:
    former = await _stored_and_made_anew(shelf, store, FakeRoots())
    roots = OvertakenRoots(errors=[(error, False)], first=former)
    with pytest.raises(StorageError, match="version 1 is on chain as"):
        await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    assert _stored_versions(store) == [("1", former)]


@pytest.mark.parametrize("again", [V3, V2, V1])
async def test_replaced_version_comes_back_after_the_trainer_was_killed(
    shelf: PolicyShelf, store: ChunkStore, again: PolicyVersion
) -> None:
    own = shelf.weights(V1)
    roots = FakeRoots()
    former = await _stored_and_made_anew(shelf, store, roots)
    roots.errors = [(KilledError(), False)]
    with pytest.raises(KilledError):
        await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    roots.roots = {V1: former}
    shelf.write(V1, own if again == V1 else shelf.weights(again))
    with pytest.raises(StorageError):
        await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    assert _stored_versions(store) == [("1", former)]


async def test_replaced_version_goes_once_the_other_is_on_chain(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    roots = FakeRoots()
    await _stored_and_made_anew(shelf, store, roots)
    # Our own transaction was mined, and sent again.
    roots.errors = [(ContractRevert("RunVersionNotIncreasing", (5, 1, 1)), True)]
    root = await _publisher(store, roots).publish(V1, shelf.path(V1), 0, 2)
    assert _stored_versions(store) == [("1", root)]


@asynccontextmanager
async def _standing_by(publisher: Publisher) -> AsyncIterator[asyncio.Task[NoReturn]]:
    task = asyncio.create_task(publisher.stand_by(every_s=0))
    yield task
    task.cancel()
    await asyncio.wait([task])


async def _turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_version_that_a_reorganisation_takes_back_is_anchored_again(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    policy_roots = FakeRoots()
    publisher = _publisher(store, policy_roots)
    async with _standing_by(publisher) as task:
        await _turns()
        assert policy_roots.sent == []
        root = await publisher.publish(V1, shelf.path(V1), 0, 2)
        await _turns()
        assert policy_roots.sent == [V1]
        del policy_roots.roots[V1]
        policy_roots.errors = [(ChainUnreachable("gone"), False)]
        await _turns()
        assert policy_roots.roots == {V1: root}
        assert policy_roots.sent == [V1, V1, V1]
        policy_roots.roots[V1] = keccak(b"other")
        with pytest.raises(StorageError, match="version 1 is on chain as"):
            await task


@pytest.mark.parametrize("removed", [(V2,), (V1, V2)])
async def test_versions_that_a_reorganisation_takes_back_are_anchored_in_their_order(
    shelf: PolicyShelf, store: ChunkStore, removed: tuple[PolicyVersion, ...]
) -> None:
    roots = FakeRoots()
    publisher = _publisher(store, roots)
    await _publish_all(publisher, shelf, 1, 2)
    before = dict(roots.roots)
    for version in removed:
        del roots.roots[version]
    async with _standing_by(publisher):
        await _turns()
    assert roots.sent == [V1, V2, *removed]
    assert roots.roots == before


async def test_next_version_is_anchored_after_those_that_a_reorganisation_took_back(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    roots = FakeRoots()
    publisher = _publisher(store, roots)
    await _publish_all(publisher, shelf, 1, 2)
    roots.roots.clear()
    roots.unreachable = 1
    await _publish_all(publisher, shelf, 3)
    assert roots.sent == [V1, V2, V1, V2, V3]


async def test_version_that_the_chain_is_past_is_left_out(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    policy_roots = FakeRoots(roots={V2: keccak(b"newer")})
    await _publisher(store, policy_roots).publish(V1, shelf.path(V1), 0, 2)
    assert policy_roots.sent == []


async def _published(shelf: PolicyShelf, store: ChunkStore) -> FakeRoots:
    policy_roots = FakeRoots()
    for version in (BASE, V1, V2, V3):
        ends = (0, 0) if version == BASE else (2 * version - 2, 2 * version)
        await _publisher(store, policy_roots).publish(version, shelf.path(version), *ends)
    return policy_roots


def _saved(version: int, newest: int | None = None) -> Saved:
    """A checkpoint of a version; later ones, up to `newest`, are damaged."""
    cursor = Cursor(2 * version, keccak(b"x"))
    state = TrainerState(PolicyVersion(version), cursor, 0, 0, {"pools": [1]})
    return Saved(state, Path(), PolicyVersion(newest or version))


@pytest.mark.parametrize(
    ("saved", "newest_on_chain"),
    [(_saved(3), 3), (_saved(3), 2), (_saved(2, newest=3), 3)],
    ids=["up to date", "ahead of the chain", "steps of a damaged checkpoint to take again"],
)
async def test_state_that_training_goes_on_from_is_kept(
    shelf: PolicyShelf, store: ChunkStore, saved: Saved, newest_on_chain: int
) -> None:
    published = (await _published(shelf, store)).roots
    roots = {version: root for version, root in published.items() if version <= newest_on_chain}
    assert catch_up(saved, roots, store, shelf, RUN) is None


async def test_fresh_run_has_no_state(shelf: PolicyShelf, store: ChunkStore) -> None:
    assert catch_up(None, {}, store, shelf, RUN) is None
    assert catch_up(None, {BASE: keccak(b"root")}, store, shelf, RUN) is None


@pytest.mark.parametrize("has_state", [True, False])
async def test_older_state_goes_on_from_the_published_policy(
    shelf: PolicyShelf, store: ChunkStore, tmp_path: Path, model_folder: Path, has_state: bool
) -> None:
    policy_roots = await _published(shelf, store)
    empty = PolicyShelf(tmp_path / "new")
    empty.adopt(model_folder)
    recent = {version: policy_roots.roots[version] for version in (V1, V2, V3)}
    found = catch_up(_saved(1) if has_state else None, recent, store, empty, RUN)
    assert found is not None
    assert (found.version, found.cursor) == (3, Cursor(6))
    assert (found.previous_start, found.step_start) == (2, 4)
    assert found.kept == ({"pools": [1]} if has_state else {})
    for name, weight in empty.weights(V3).items():
        assert torch.equal(weight, shelf.weights(V3)[name])
    assert [empty.has(version) for version in (V1, V2, V3)] == [True, True, True]


async def test_older_state_goes_on_with_the_checkpoints_that_a_rollback_needs(
    shelf: PolicyShelf, store: ChunkStore, tmp_path: Path
) -> None:
    roots = (await _published(shelf, store)).roots
    identity, guard = Identity(RUN, keccak(b"recipe"), 31337), Guard(action="rollback")
    guard.good = (V1,)
    learner = Learner(shelf.path(BASE), make_recipe(), published=shelf.weights)
    state = TrainerState(V2, Cursor(4), 2, 0, {"guard": guard.state()})
    before = Checkpoints(tmp_path / "checkpoints", identity)
    for version in (V1, V2):
        before.save(replace(state, version=version), learner.state()).result(10)
    before.close()
    settings = TrainerSettings(run=RUN, keystore=tmp_path, orchestrator="http://x")
    nothing: Any = None
    assembly = _Assembly(settings, RUN, make_recipe(), store, nothing, KEY)
    checkpoints = Checkpoints(tmp_path / "checkpoints", identity)
    assembly._catch_up(checkpoints, shelf, {v: roots[v] for v in (V1, V2, V3)}, learner)
    checkpoints.close()
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.state.version == V3
    assert newest.state.kept["guard"]["good"] == [V1]
    learner.restore(checkpoints.read(checkpoints.folder_of(V1), learner))


@pytest.mark.parametrize(
    ("where", "goes_on_from"),
    [({}, V2), ({"sites": 2}, V3), ({"device": "cuda"}, V3)],
    ids=["CPU", "sites", "GPU"],
)
async def test_damaged_checkpoint_costs_its_step_only_where_a_repeated_step_is_the_same(
    shelf: PolicyShelf,
    store: ChunkStore,
    tmp_path: Path,
    where: dict[str, Any],
    goes_on_from: PolicyVersion,
) -> None:
    roots = (await _published(shelf, store)).roots
    learner = Learner(shelf.path(BASE), make_recipe(), published=shelf.weights)
    checkpoints = Checkpoints(tmp_path / "checkpoints", Identity(RUN, keccak(b"recipe"), 31337))
    for version in (V2, V3):
        state = TrainerState(version, Cursor(2 * version), 2 * version - 2, 2 * version - 4)
        checkpoints.save(state, learner.state()).result(10)
    (checkpoints.folder_of(V3) / "state.json").write_bytes(b"")
    settings = TrainerSettings(run=RUN, keystore=tmp_path, orchestrator="http://x", **where)
    nothing: Any = None
    assembly = _Assembly(settings, RUN, make_recipe(), store, nothing, KEY)
    assembly._catch_up(checkpoints, shelf, {v: roots[v] for v in (V1, V2, V3)}, learner)
    checkpoints.close()
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.state.version, newest.state.cursor) == (goes_on_from, Cursor(2 * goes_on_from))


async def test_damaged_checkpoint_of_an_unpublished_version_costs_its_step_alone(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    roots = (await _published(shelf, store)).roots
    before = {version: root for version, root in roots.items() if version <= V2}
    assert catch_up(_saved(2, newest=3), before, store, shelf, RUN, repeats=False) is None


async def test_chain_ahead_of_store_and_state_is_refused(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    policy_roots = await _published(shelf, store)
    store.remove(RUN, V3)
    with pytest.raises(StorageError, match="neither the state folder nor the store has it"):
        catch_up(None, policy_roots.roots, store, shelf, RUN)


async def test_store_that_contradicts_the_chain_is_refused(
    shelf: PolicyShelf, store: ChunkStore
) -> None:
    policy_roots = await _published(shelf, store)
    policy_roots.roots[V3] = keccak(b"other")
    with pytest.raises(StorageError, match="not the one on chain"):
        catch_up(None, policy_roots.roots, store, shelf, RUN)


async def test_base_model_comes_from_the_store(
    shelf: PolicyShelf, store: ChunkStore, tmp_path: Path
) -> None:
    await _published(shelf, store)
    pinned = state_hash(policy_files(shelf.path(BASE)))
    empty = PolicyShelf(tmp_path / "new")
    provide_base_model(empty, None, store, RUN, pinned)
    assert state_hash(policy_files(empty.path(BASE))) == pinned


def test_base_model_comes_from_its_folder(
    store: ChunkStore, model_folder: Path, tmp_path: Path
) -> None:
    empty = PolicyShelf(tmp_path / "new")
    pinned = state_hash(policy_files(model_folder))
    provide_base_model(empty, model_folder, store, RUN, pinned)
    assert empty.has(BASE)


def test_missing_base_model_is_asked_for(store: ChunkStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base model is neither") as caught:
        provide_base_model(PolicyShelf(tmp_path / "new"), None, store, RUN, keccak(b"x"))
    assert "--model" in (caught.value.hint or "")


def test_other_base_model_than_pinned_is_refused(
    store: ChunkStore, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="run 5 pins"):
        provide_base_model(
            PolicyShelf(tmp_path / "new"), model_folder, store, RUN, keccak(b"other")
        )
