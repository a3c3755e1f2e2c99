"""Checkpoints: complete or absent, the right one, the previous one if the newest is damaged."""

import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, current_thread

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from trainer_fakes import Feed, make_recipe, make_rollouts

from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, StorageError
from muster.protocol.ids import PolicyVersion, RunId
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.parallel import Ranks
from muster.trainer.learn.persistence import restore_state, training_state
from muster.trainer.recover import checkpoint as checkpoint_module
from muster.trainer.recover.checkpoint import STATE_FILE, Checkpoints, Identity, Saved, TrainerState
from muster.trainer.stream.reader import Cursor, FileBuffer

IDENTITY = Identity(RunId(3), keccak(b"recipe"), 31337)
WEIGHT = torch.arange(6, dtype=torch.float32)


@dataclass
class Anything:
    """Accepts any saved state."""

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: torch.zeros(size) for name, size in sizes.items()}


def _state(version: int = 4) -> TrainerState:
    return TrainerState(
        version=PolicyVersion(version),
        cursor=Cursor(9, keccak(b"last")),
        step_start=7,
        previous_start=5,
        kept={"pools": {"p1": [3, 0.1]}},
    )


def _tensors(version: int = 4) -> dict[str, Tensor]:
    return {"model.w": WEIGHT * version, "optimizer.w.exp_avg": WEIGHT / 3}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    """An empty folder of checkpoints."""
    made = Checkpoints(tmp_path / "state" / "checkpoints", IDENTITY)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the checkpoints."""
    return tmp_path / "state" / "checkpoints"


def _save(checkpoints: Checkpoints, *versions: int) -> None:
    for version in versions:
        checkpoints.save(_state(version), _tensors(version)).result(10)


def _newest(checkpoints: Checkpoints) -> Saved:
    found = checkpoints.newest()
    assert found is not None
    return found


def test_state_is_what_was_saved(checkpoints: Checkpoints, folder: Path) -> None:
    assert checkpoints.newest() is None
    _save(checkpoints, 4)
    saved = _newest(checkpoints)
    assert saved == Saved(_state(), folder / "4", PolicyVersion(4))
    read = checkpoints.read(saved.folder, Anything())
    assert read.keys() == _tensors().keys()
    assert all(torch.equal(read[name], value) for name, value in _tensors().items())


def test_tensors_may_change_once_they_are_released(checkpoints: Checkpoints) -> None:
    tensors, released = {"model.w": torch.ones(100_000)}, Event()
    writing = checkpoints.save(_state(), tensors, release=released.set)
    assert released.wait(10)
    tensors["model.w"].zero_()
    writing.result(10)
    read = checkpoints.read(_newest(checkpoints).folder, Anything())
    assert float(read["model.w"].sum()) == 100_000


def test_nothing_is_saved_when_what_comes_first_fails(
    checkpoints: Checkpoints, folder: Path
) -> None:
    _save(checkpoints, 4)
    released = Event()

    def fail() -> None:
        raise StorageError("the policy cannot be written")

    writing = checkpoints.save(_state(5), _tensors(5), first=fail, release=released.set)
    with pytest.raises(StorageError, match="the policy cannot be written"):
        writing.result(10)
    assert released.is_set()
    assert [path.name for path in folder.iterdir()] == ["4"]


def test_crash_between_tensors_leaves_the_state_before(
    checkpoints: Checkpoints, folder: Path
) -> None:
    _save(checkpoints, 4)
    partial = folder / ".5.part"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"the first tensor, and half of the second")
    assert _newest(checkpoints).state.version == 4
    _save(checkpoints, 5)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "5"]
    assert _newest(checkpoints).state.version == 5


def test_only_the_newest_are_kept(checkpoints: Checkpoints, folder: Path) -> None:
    _save(checkpoints, 1, 2, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, run_id=RunId(4)),
        replace(IDENTITY, recipe_hash=keccak(b"other")),
        replace(IDENTITY, chain_id=1),
    ],
)
def test_state_of_another_run_is_refused(
    checkpoints: Checkpoints, folder: Path, other: Identity
) -> None:
    _save(checkpoints, 4)
    with pytest.raises(StorageError, match="belongs to run 3 on chain 31337") as caught:
        Checkpoints(folder, other).newest()
    assert "--state-dir" in (caught.value.hint or "")


def test_state_of_another_schema_is_refused(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(checkpoints, 4)
    monkeypatch.setattr(checkpoint_module, "SCHEMA_VERSION", 3)
    with pytest.raises(StorageError, match="schema version 2, not 3"):
        checkpoints.newest()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _move_on(path: Path) -> None:
    """Change one number of the state."""
    document = json.loads(path.read_text())
    document["state"]["position"] += 2
    path.write_text(json.dumps(document))


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tensors truncated": ("__0_0.distcp", _truncate),
    "tensors flipped": ("__0_0.distcp", _flip),
    "tensors gone": ("__0_0.distcp", Path.unlink),
    "index flipped": (".metadata", _flip),
    "index replaced": (".metadata", lambda path: path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")),
    "state truncated": (STATE_FILE, _truncate),
    "state empty": (STATE_FILE, lambda path: path.write_bytes(b"")),
    "state of another type": (STATE_FILE, lambda path: path.write_bytes(b"[]")),
    "state changed": (STATE_FILE, _move_on),
    "folder empty": ("", lambda path: (shutil.rmtree(path), path.mkdir())),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_state_stands_back_behind_the_one_before(
    checkpoints: Checkpoints, folder: Path, damage: str
) -> None:
    _save(checkpoints, 3, 4)
    name, break_it = DAMAGE[damage]
    break_it(folder / "4" / name)
    assert _newest(checkpoints) == Saved(_state(3), folder / "3", PolicyVersion(4))


def test_damaged_states_only_are_refused(checkpoints: Checkpoints, folder: Path) -> None:
    _save(checkpoints, 3, 4)
    for version in ("3", "4"):
        _flip(folder / version / "__0_0.distcp")
    with pytest.raises(StorageError, match=r"all checkpoints in .* are damaged"):
        checkpoints.newest()


def test_step_saved_again_replaces_a_damaged_one(checkpoints: Checkpoints, folder: Path) -> None:
    _save(checkpoints, 3, 4)
    _flip(folder / "4" / "__0_0.distcp")
    _save(checkpoints, 4)
    assert _newest(checkpoints).state.version == 4


def test_other_ranks_get_signs_of_life_while_states_are_hashed(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(checkpoints, 3, 4)
    ranks, beats, digest_of = Ranks(), list[bool](), checkpoint_module._digest
    is_beating = False

    @contextmanager
    def beating() -> Iterator[None]:
        nonlocal is_beating
        is_beating = True
        yield
        is_beating = False

    def digest(path: Path) -> str:
        beats.append(is_beating)
        return digest_of(path)

    monkeypatch.setattr(ranks, "beating", beating)
    monkeypatch.setattr(checkpoint_module, "_digest", digest)
    leader = Checkpoints(folder, IDENTITY, ranks=ranks)
    assert _newest(leader).state.version == 4
    leader.close()
    assert beats == [True, True]
    assert not is_beating


@pytest.mark.parametrize(
    ("device", "chosen"), [("cuda", 1), ("cuda:2", torch.device("cuda:2")), ("cpu", None)]
)
def test_tensors_are_written_on_the_learner_s_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, chosen: object
) -> None:
    seen: list[tuple[str, object]] = []

    def note(gpu: object) -> None:
        seen.append((current_thread().name, gpu))

    def written() -> None:
        note("written")

    monkeypatch.setattr("torch.cuda.set_device", note)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    made = Checkpoints(folder, IDENTITY, device=device)
    made.save(_state(), _tensors(), first=written).result(10)
    made.close()
    assert [gpu for _, gpu in seen] == [*[chosen] * (chosen is not None), "written"]
    assert {thread for thread, _ in seen} == {"checkpoint_0"}


def test_torn_folder_is_not_seen(checkpoints: Checkpoints, folder: Path) -> None:
    _save(checkpoints, 4)
    shutil.copytree(folder / "4", folder / ".5.part")
    assert _newest(checkpoints).state.version == 4


@pytest.mark.parametrize("part", ["write_data", "finish"])
def test_failed_save_keeps_the_previous_state(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    _save(checkpoints, 4)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"torch.distributed.checkpoint.filesystem.FileSystemWriter.{part}", fail)
    with pytest.raises(StorageError, match=r"(?s)cannot save the trainer's state.*No space left"):
        _save(checkpoints, 5)
    monkeypatch.undo()
    assert _newest(checkpoints).state.version == 4
    assert [path.name for path in folder.iterdir()] == ["4"]


def test_state_that_is_gone_is_named(checkpoints: Checkpoints, folder: Path) -> None:
    with pytest.raises(StorageError, match=f"cannot read the trainer's state in {folder / '4'}"):
        checkpoints.read(folder / "4", Anything())


def test_tensors_of_another_shape_are_refused(checkpoints: Checkpoints) -> None:
    _save(checkpoints, 4)

    class Other:
        def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
            return {name: torch.zeros(99) for name in sizes}

    with pytest.raises(StorageError, match="cannot read the trainer's state"):
        checkpoints.read(_newest(checkpoints).folder, Other())


# --------------------------------------------------------------- what a learner's state is made of


def test_learner_s_state_goes_through_the_disk_bit_by_bit(
    checkpoints: Checkpoints, model_folder: Path
) -> None:
    rows = make_rollouts(1)
    groups = [rows[:4], rows[4:]]
    one, two = (Learner(model_folder, make_recipe(), published=lambda _: base) for _ in range(2))
    base = {name: value.clone() for name, value in one.weights().items()}
    one.step(1, groups)  # type: ignore[arg-type]
    checkpoints.save(_state(1), one.state()).result(10)
    two.restore(checkpoints.read(_newest(checkpoints).folder, two))
    for learner in (one, two):
        learner.step(2, groups)  # type: ignore[arg-type]
    assert all(torch.equal(two.state()[n], value) for n, value in one.state().items())
    assert {name.split(".")[0] for name in one.state()} == {"model", "optimizer", "random"}


def test_state_of_another_architecture_changes_nothing(
    checkpoints: Checkpoints, model_folder: Path
) -> None:
    learner = Learner(model_folder, make_recipe(), published=lambda _: None)
    learner.step(1, [make_rollouts(1)])  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in learner.state().items()}
    names = sorted(before)
    weight, moment = (next(n for n in names if n.startswith(k)) for k in ("model.", "optimizer."))
    foreign: dict[str, dict[str, Tensor]] = {
        "model.more": {"model.more": torch.ones(3)},
        "optimizer.more.step": {"optimizer.more.step": torch.tensor(1.0)},
        weight: {weight: before[weight][:-1]},
        moment: {moment: before[moment][:-1]},
    }
    for version, (named, other) in enumerate(foreign.items(), start=1):
        checkpoints.save(_state(version), {**before, **other}).result(10)
        with pytest.raises(StorageError, match=f"tensors differ in .*{named}"):
            checkpoints.read(checkpoints.folder_of(PolicyVersion(version)), learner)
        with pytest.raises(ValueError, match=f"tensors differ in .*{named}"):
            learner.restore({**before, **other})
    assert learner.state().keys() == before.keys()
    assert all(torch.equal(learner.state()[n], v) for n, v in before.items())


def test_state_is_read_once_the_one_before_is_written(
    checkpoints: Checkpoints, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(model_folder, make_recipe(), published=lambda _: None)
    checkpoints.save(_state(1), learner.state()).result(10)
    learner.step(1, [make_rollouts(1)])  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in learner.weights().items()}
    release, held, asked = learner.hold(), learner._held, Event()
    wait = held.wait

    def waited(within_s: float) -> bool:
        asked.set()
        return wait(within_s)

    monkeypatch.setattr(held, "wait", waited)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(checkpoints.read, _newest(checkpoints).folder, learner)
        assert asked.wait(10)
        assert all(torch.equal(learner.weights()[n], value) for n, value in before.items())
        release()
        learner.restore(reading.result(10))
    assert not all(torch.equal(learner.weights()[n], value) for n, value in before.items())
    assert not [name for name in learner.state() if name.startswith("optimizer.")]


def test_next_step_s_gradient_is_computed_while_the_state_is_written(
    checkpoints: Checkpoints, model_folder: Path
) -> None:
    """The writer waits until the next step has a gradient."""
    learner = Learner(model_folder, make_recipe(), published=lambda _: None)
    rows = make_rollouts(1)
    groups = [rows[:4], rows[4:]]
    learner.step(1, groups)  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in learner.state().items()}
    may_write = Event()
    hooks = [
        weight.register_post_accumulate_grad_hook(lambda _: may_write.set())
        for weight in learner.model.parameters()
    ]
    writing = checkpoints.save(
        _state(1), learner.state(), first=lambda: may_write.wait(10), release=learner.hold()
    )
    learner.step(2, groups)  # type: ignore[arg-type]
    writing.result(10)
    for hook in hooks:
        hook.remove()
    saved = checkpoints.read(_newest(checkpoints).folder, Anything())
    assert all(torch.equal(saved[name].to(v.dtype), v) for name, v in before.items())
    assert not all(torch.equal(learner.state()[name], value) for name, value in before.items())


def test_generators_go_on_where_they_were() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {k: v.clone() for k, v in training_state(model, optimizer).items()}

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.normal())

    expected = [draw() for _ in range(3)]
    restore_state(model, optimizer, state)
    assert [draw() for _ in range(3)] == expected


def test_fresh_optimiser_is_saved_and_restored_as_fresh() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = training_state(model, optimizer)
    assert not [name for name in state if name.startswith("optimizer.")]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    restore_state(model, optimizer, state)
    assert not optimizer.state


def test_optimiser_s_state_of_names_that_begin_alike_is_not_mixed() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "a_": torch.nn.Linear(2, 1)})
    model["a"].extra = torch.nn.Linear(2, 1)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    for value, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(value))
    optimizer.step()
    before = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    restore_state(model, optimizer, training_state(model, optimizer))
    after = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(
        optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} for p in model.parameters()
    )


# ------------------------------------------------------------------------------- buffered files


async def test_file_is_asked_for_once(tmp_path: Path) -> None:
    feed = Feed()
    digest = feed.submit(make_rollouts(1))
    buffer = FileBuffer(tmp_path, feed.files, feed.ledger)
    data = await buffer.file(digest)
    feed.files.stored.clear()
    assert await FileBuffer(tmp_path, feed.files, feed.ledger).file(digest) == data
    assert feed.files.asked == [digest]


async def test_damaged_buffered_file_is_asked_for_again(tmp_path: Path) -> None:
    feed = Feed()
    digest = feed.submit(make_rollouts(1))
    buffer = FileBuffer(tmp_path, feed.files, feed.ledger)
    data = await buffer.file(digest)
    (tmp_path / digest.hex()).write_bytes(data[:-1])
    assert await buffer.file(digest) == data
    assert (tmp_path / digest.hex()).read_bytes() == data


async def test_another_file_than_asked_for_is_not_kept(tmp_path: Path) -> None:
    feed = Feed()
    digest = feed.submit(make_rollouts(1))
    feed.files.lies[digest] = b"other"
    buffer = FileBuffer(tmp_path, feed.files, feed.ledger)
    assert await buffer.file(digest) == b"other"
    assert not list(tmp_path.iterdir())


async def test_files_of_consumed_records_are_forgotten(tmp_path: Path) -> None:
    feed = Feed()
    digests = [feed.submit(make_rollouts(seed)) for seed in range(4)]
    buffer = FileBuffer(tmp_path, feed.files, feed.ledger)
    for digest in digests:
        await buffer.file(digest)
    buffer.forget_before(2)
    assert {path.name for path in tmp_path.iterdir()} == {d.hex() for d in digests[2:]}


async def test_full_disk_costs_a_second_download_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed()
    digest = feed.submit(make_rollouts(1))
    buffer = FileBuffer(tmp_path, feed.files, feed.ledger)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    data = await buffer.file(digest)
    assert await buffer.file(digest) == data
    assert feed.files.asked == [digest, digest]


async def test_file_that_nobody_has_is_reported(tmp_path: Path) -> None:
    feed = Feed()
    digest = feed.submit(make_rollouts(1))
    feed.files.failures[digest] = 1
    with pytest.raises(ApiError):
        await FileBuffer(tmp_path, feed.files, feed.ledger).file(digest)


class _Touch:
    """Unpickled, it makes a file: a stand-in for any program."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)


def _forge(saved: Path, *, lists_metadata: bool = True, **changes: object) -> None:
    """Change a step's metadata, and write its digest anew as anybody can."""
    path = saved / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    vars(metadata).update(changes)
    path.write_bytes(pickle.dumps(metadata))
    value = json.loads((saved / STATE_FILE).read_text())["state"]
    value["files"][".metadata"] = checkpoint_module._digest(path)
    if not lists_metadata:
        del value["files"][".metadata"]
    checkpoint_module._write_state(saved / STATE_FILE, value)


def test_metadata_that_is_a_program_is_not_run(
    checkpoints: Checkpoints, folder: Path, tmp_path: Path
) -> None:
    _save(checkpoints, 4)
    trace = tmp_path / "it ran"
    _forge(folder / "4", planner_data=_Touch(trace))
    saved = _newest(checkpoints)
    with pytest.raises(StorageError, match=r"it names pathlib.*Path.touch, which metadata"):
        checkpoints.read(saved.folder, Anything())
    assert not trace.exists()


def test_values_that_torch_would_unpickle_are_refused(
    checkpoints: Checkpoints, folder: Path
) -> None:
    _save(checkpoints, 4)
    metadata = pickle.loads((folder / "4" / ".metadata").read_bytes())
    entries = metadata.state_dict_metadata
    for strange, message in ((BytesStorageMetadata(), "BytesStorageMetadata"), (3, "more than")):
        _forge(folder / "4", state_dict_metadata=entries | {"model.w": strange})
        with pytest.raises(StorageError, match=message):
            checkpoints.read(folder / "4", Anything())
    _forge(folder / "4", state_dict_metadata=entries)
    read = checkpoints.read(folder / "4", Anything())
    assert torch.equal(read["model.w"], WEIGHT * 4)


@pytest.mark.parametrize("junk", [b"", b"junk", b"\x80\x04K\x01."])
def test_metadata_that_is_no_pickle_of_it_is_named(
    checkpoints: Checkpoints, folder: Path, junk: bytes
) -> None:
    _save(checkpoints, 4)
    (folder / "4" / ".metadata").write_bytes(junk)
    with pytest.raises(StorageError, match=r"\.metadata is damaged"):
        checkpoints.read(folder / "4", Anything())


def test_step_without_a_digest_of_its_metadata_is_damaged(
    checkpoints: Checkpoints, folder: Path
) -> None:
    _save(checkpoints, 3, 4)
    _forge(folder / "4", lists_metadata=False)
    assert _newest(checkpoints).state.version == 3
