"""The trainer's state on disk: one folder per training step, either complete or absent.

`<folder>/<version>/` holds the tensors and `state.json`. torch.distributed.checkpoint writes the
tensors: each process its own shards, which any number of processes can read. `state.json` holds
what the flow remembers, the owner of the state, and the BLAKE3 digest of every file. A step is
written from the live tensors, not from a copy, while the next step is read and its gradient
computed; the learner does not change them until they are written (`Learner.hold`). The folder gets
its name when everything in it is on the disk. The newest `keep` steps stay: a damaged one is
skipped, and its step taken again. Whoever writes to a folder chooses the weights; digests find
damage, not forgery. But nothing in a folder runs as a program.
"""

import json
import logging
import pickle
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from muster.lifecycle import sync_path
from muster.protocol.encoding import hex0x
from muster.protocol.errors import MusterError, StorageError, storage_error_of
from muster.protocol.ids import Hash32, PolicyVersion, RunId, to_hash32
from muster.shardcast.digests import region_digest
from muster.trainer.learn.parallel import ONE_PROCESS, Ranks
from muster.trainer.stream.reader import Cursor

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
"""Version of the folder's format."""
STATE_FILE = "state.json"
"""Everything that is not a tensor."""
METADATA_FILE = ".metadata"
"""Names, sizes and places of the tensors, which torch pickles."""
_METADATA = "torch.distributed.checkpoint.metadata"
_PICKLED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}
"""All that metadata of tensors needs besides types of numbers. Metadata of other values would have
torch unpickle those without any limit.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The run, recipe and chain of a checkpoint; one with another identity is refused."""

    run_id: RunId
    recipe_hash: Hash32
    chain_id: int

    def to_json(self) -> dict[str, Any]:
        """Return the identity as a checkpoint stores it."""
        return {
            "run_id": int(self.run_id),
            "chain_id": self.chain_id,
            "recipe_hash": hex0x(self.recipe_hash),
        }

    def described(self, found: Mapping[str, Any]) -> str:
        """Describe the owner of another checkpoint, given its stored identity."""
        return f"run {found['run_id']} on chain {found['chain_id']}"


class Owner(Protocol):
    """The owner of checkpoints: an `Identity`, or its counterpart where there is no run."""

    def to_json(self) -> dict[str, Any]:
        """Return the owner as a checkpoint stores it."""

    def described(self, found: Mapping[str, Any]) -> str:
        """Describe the owner of another checkpoint, given its stored identity."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """All that the next training step depends on besides the learner's tensors."""

    version: PolicyVersion
    """Version of the saved weights; also the number of training steps taken."""
    cursor: Cursor
    """How much of the training stream the weights have seen."""
    step_start: int
    """Stream position at which this version's step began."""
    previous_start: int
    """Stream position at which the step before began; its version may not be on chain yet."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Other plain values that the flow carries from step to step, by name."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete step on disk."""

    state: TrainerState
    """State from which the flow resumes."""
    folder: Path
    """Folder of the tensors."""
    newest: PolicyVersion
    """The newest version that was ever saved; above `state.version` when its checkpoint is
    damaged."""


class Template(Protocol):
    """A learner, which owns the tensors that a checkpoint is read into."""

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        """Return the tensors to read into, sharded for this process, by name; names that it lacks
        are not read. Raises ValueError when the sizes are not its own.
        """


class _Reader(FileSystemReader):
    """Reads a step's tensors; its metadata may name nothing but tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = folder / METADATA_FILE

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata; raises ValueError when it is damaged or names anything else."""
        try:
            with self._metadata.open("rb") as file:
                found = _MetadataUnpickler(file).load()
            if not all(
                isinstance(stored, TensorStorageMetadata)
                for stored in found.state_dict_metadata.values()
            ):
                raise ValueError("it describes more than tensors")
            found.storage_meta.load_id = self.load_id
        except OSError:
            raise
        except Exception as error:  # bytes that are no pickle raise almost anything
            raise ValueError(f"{METADATA_FILE} is damaged: {error}") from error
        metadata: Metadata = found
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_number = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_number or (module, name) in _PICKLED:
            return super().find_class(module, name)
        raise ValueError(f"it names {module}.{name}, which metadata of tensors does not need")


class Checkpoints:
    """The newest states of one training in one folder."""

    def __init__(
        self,
        folder: Path,
        owner: Owner,
        *,
        keep: int = 2,
        ranks: Ranks = ONE_PROCESS,
        device: str = "cpu",
    ) -> None:
        """`keep` is at least 2, so the previous checkpoint exists while a new one is written.
        `latest` is the state that was saved or read last. `device` is the learner's; `cuda` means
        the GPU of the calling thread.
        """
        self._folder = folder
        self._owner = owner
        self.keep = keep
        self.retained: frozenset[PolicyVersion] = frozenset()
        """Older versions that are kept as well."""
        self._ranks = ranks
        self.latest: TrainerState | None = None
        ranks.lead("storage", (folder.absolute(), owner))
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_to_gpu(torch.device(device))
        )

    def behind(self, work: Callable[[], object]) -> Future[object]:
        """Queue some work in the writing thread, after all that is queued now."""
        return self._thread.submit(work)

    def save(
        self,
        state: TrainerState,
        tensors: Mapping[str, Tensor],
        *,
        first: Callable[[], object] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> Future[None]:
        """Write a step in the background, after `first`; on every rank, with its own shards.

        The tensors must not change until `release` is called. If the step cannot be written, the
        future raises StorageError and earlier checkpoints stay.
        """
        self._ranks.lead("save", state)
        try:
            fresh = self._fresh(state.version)
        except OSError as error:
            release()
            raise _cannot_save(self._folder, error) from error
        self.latest = state
        return self._thread.submit(self._write, state, dict(tensors), fresh, first, release)

    def newest(self) -> Saved | None:
        """Return the newest complete step, None when nothing was ever saved.

        Raises StorageError when all are damaged, or one belongs to another run, chain or recipe.
        """
        versions = self._versions()
        for version in versions:
            path = self._folder / str(version)
            try:
                with self._ranks.beating():
                    state = self._read_state(path)
            except StorageError:
                raise
            except (OSError, LookupError, ValueError, TypeError) as error:
                logger.error(
                    "damaged checkpoint skipped",
                    extra={"policy_version": version, "error": str(error)},
                )
                continue
            self.latest = state
            return Saved(state, path, versions[0])
        if versions:
            raise StorageError(
                f"all checkpoints in {self._folder} are damaged",
                hint="restore a checkpoint, or move all of them away: the trainer then continues "
                "from the newest published policy",
            )
        return None

    def read(self, folder: Path, template: Template) -> dict[str, Tensor]:
        """Return a saved step's tensors, read in place into those of `template`; on every rank.

        Raises StorageError when the saved tensors do not fit the template, which is then unchanged,
        or cannot be read: it then holds a part of them, and must not be used.
        """
        self._ranks.lead("read", folder)
        reader = _Reader(folder)
        try:
            found = reader.read_metadata().state_dict_metadata
            sizes = {
                name: tuple(stored.size)
                for name, stored in found.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            tensors = dict(template.like(sizes))
            load(
                tensors,
                storage_reader=reader,
                process_group=self._ranks.storage_group,
                no_dist=self._ranks.size == 1,
            )
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            raise StorageError(
                f"cannot read the trainer's state in {folder}: {_cause(error)}"
            ) from error
        return tensors

    def folder_of(self, version: PolicyVersion) -> Path:
        """Return the path of a step's folder, which may not exist."""
        return self._folder / str(version)

    def forget(self) -> None:
        """Delete all states, before the state of another site is taken over."""
        for version in self._versions():
            shutil.rmtree(self._folder / str(version), ignore_errors=True)
        self.latest = None

    def close(self) -> None:
        """Wait for the current write, and write nothing more."""
        self._thread.shutdown(wait=True)

    def _fresh(self, version: PolicyVersion) -> Path:
        """Return an empty folder to write the step to."""
        fresh = self._folder / f".{version}.part"
        if self._ranks.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        self._ranks.wait_for_all()
        return fresh

    def _write(
        self,
        state: TrainerState,
        tensors: dict[str, Tensor],
        fresh: Path,
        first: Callable[[], object],
        release: Callable[[], None],
    ) -> None:
        """Write this rank's tensors one by one; when all ranks have, give the folder its name."""
        try:
            try:
                first()
                self._write_tensors(fresh, tensors)
            finally:
                release()
            self._finish(state, fresh)
        except (OSError, RuntimeError, CheckpointException) as error:
            shutil.rmtree(fresh, ignore_errors=True)
            if isinstance(error, MusterError):
                raise
            raise _cannot_save(self._folder, error) from error

    def _write_tensors(self, fresh: Path, tensors: dict[str, Tensor]) -> None:
        write_tensors(
            tensors,
            # The files are flushed to the disk before the tensors may change again.
            storage_writer=FileSystemWriter(fresh, overwrite=True, sync_files=False),
            process_group=self._ranks.storage_group,
            no_dist=self._ranks.size == 1,
        )

    def _finish(self, state: TrainerState, fresh: Path) -> None:
        """Give the folder its name once all ranks' files are on the disk."""
        own = [path for path in fresh.iterdir() if self._ranks.wrote(path.name)]
        for path in own:
            sync_path(path)
        digests = self._ranks.gather_stored({path.name: _digest(path) for path in own})
        if self._ranks.rank:
            return
        _write_state(fresh / STATE_FILE, self._to_dict(state, digests))
        sync_path(fresh)
        shutil.rmtree(self._folder / str(state.version), ignore_errors=True)
        fresh.rename(self._folder / str(state.version))
        sync_path(self._folder)
        for version in set(self._versions()[self.keep :]) - self.retained:
            shutil.rmtree(self.folder_of(version), ignore_errors=True)

    def _versions(self) -> list[PolicyVersion]:
        """Return the versions that have a folder, newest first."""
        if not self._folder.is_dir():
            return []
        names = [path.name for path in self._folder.iterdir() if path.name.isdecimal()]
        return [PolicyVersion(v) for v in sorted(map(int, names), reverse=True)]

    def _to_dict(self, state: TrainerState, digests: Mapping[str, str]) -> dict[str, Any]:
        last = state.cursor.last
        return {
            "schema_version": SCHEMA_VERSION,
            **self._owner.to_json(),
            "version": int(state.version),
            "position": state.cursor.position,
            "last": hex0x(last) if last is not None else None,
            "step_start": state.step_start,
            "previous_start": state.previous_start,
            "kept": state.kept,
            "files": dict(sorted(digests.items())),
        }

    def _read_state(self, folder: Path) -> TrainerState:
        document = json.loads((folder / STATE_FILE).read_bytes())
        value = document["state"]
        if document["digest"] != _digest_of(value):
            raise ValueError(f"{STATE_FILE} is not what was written")
        if value["schema_version"] != SCHEMA_VERSION:
            raise StorageError(
                f"{folder} has schema version {value['schema_version']}, not {SCHEMA_VERSION}",
                hint="use the version of muster that wrote this folder",
            )
        self._check_identity(value, folder)
        if METADATA_FILE not in value["files"]:
            raise ValueError(f"{STATE_FILE} has no digest of {METADATA_FILE}")
        for name, digest in value["files"].items():
            if _digest(folder / name) != digest:
                raise ValueError(f"{name} is not what was written")
        return _from_dict(value)

    def _check_identity(self, value: Mapping[str, Any], folder: Path) -> None:
        own = self._owner.to_json()
        found = {name: value.get(name) for name in own}
        if found != own:
            raise StorageError(
                f"{folder} belongs to {self._owner.described(found)}",
                hint="give every run a --state-dir of its own",
            )


def _from_dict(value: Mapping[str, Any]) -> TrainerState:
    last = to_hash32(value["last"]) if value["last"] is not None else None
    return TrainerState(
        version=PolicyVersion(value["version"]),
        cursor=Cursor(value["position"], last),
        step_start=value["step_start"],
        previous_start=value["previous_start"],
        kept=value["kept"],
    )


def _to_gpu(device: torch.device) -> Callable[[], None] | None:
    """Return what makes a thread work on a device; None for a CPU.

    torch copies a shard to the host in the order of the stream of the thread's GPU: on another GPU
    it would write numbers that have not arrived.
    """
    if device.type != "cuda":
        return None
    gpu = torch.cuda.current_device() if device.index is None else device
    return partial(torch.cuda.set_device, gpu)


def _write_state(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps({"digest": _digest_of(value), "state": value}))
    sync_path(path)


def _digest_of(value: Any) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return region_digest(file.fileno(), 0, path.stat().st_size).hex()


def _cannot_save(folder: Path, error: BaseException) -> StorageError:
    what = f"cannot save the trainer's state to {folder}: {_cause(error)}"
    return storage_error_of(_cause(error), what)


def _cause(error: BaseException) -> BaseException:
    """Return the error of the first rank that failed."""
    if isinstance(error, CheckpointException):
        return next((cause for cause, _ in error.failures.values()), error)
    return error
