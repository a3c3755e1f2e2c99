"""The trainer's first task: its folder must agree with the chain.

Finds the base model. When the chain is ahead of the saved state (an older folder was restored, none
survived, or the newest checkpoint is damaged and its step cannot be repeated bit by bit), continues
from the newest published version in the origin's own store.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore, Manifest, state_hash
from muster.trainer.publish.policies import BASE, PolicyShelf, fresh_folder, policy_files
from muster.trainer.recover.checkpoint import Saved, TrainerState
from muster.trainer.stream.reader import Cursor

logger = logging.getLogger(__name__)


def provide_base_model(
    shelf: PolicyShelf, model: Path | None, store: ChunkStore, run_id: RunId, pinned: Hash32
) -> None:
    """Put the base model on the shelf: from a model folder, else from the store.

    Raises ConfigError when neither has it, or its hash is not the pinned one.
    """
    if not shelf.has(BASE):
        if model is not None:
            shelf.adopt(model)
        elif store.is_complete(run_id, BASE):
            _unpack(store, _manifest(store, run_id, BASE), shelf)
        else:
            raise ConfigError(
                f"run {run_id}: the base model is neither in the store nor in the state folder",
                hint="give its folder: --model DIR",
            )
    found = state_hash(policy_files(shelf.path(BASE)))
    if found != pinned:
        raise ConfigError(
            f"the base model's hash is {hex0x(found)}, but run {run_id} pins {hex0x(pinned)}",
            hint="give the folder the run was created with: --model DIR",
        )


def catch_up(
    saved: Saved | None,
    roots: Mapping[PolicyVersion, Hash32],
    store: ChunkStore,
    shelf: PolicyShelf,
    run_id: RunId,
    *,
    repeats: bool = True,
) -> TrainerState | None:
    """Put the newest published version on the shelf and return the state to continue from.

    None when the saved state is as new. Where a step that is taken again `repeats` its version, bit
    by bit, it is also None when only the newest checkpoint is damaged: its step is taken again from
    the one before. `roots` are the roots on chain of the newest versions that rollouts may come
    from. Raises StorageError when the store does not have the versions.
    """
    newest = max(roots, default=BASE)
    reached = BASE if saved is None else saved.newest if repeats else saved.state.version
    if newest <= reached:
        return None
    manifests = [_anchored(store, run_id, version, roots[version]) for version in sorted(roots)]
    for manifest in manifests:
        if manifest.version != BASE:
            _unpack(store, manifest, shelf)
    last = manifests[-1]
    logger.warning(
        "the chain is ahead of the saved state: continuing from the published policy",
        extra={"policy_version": newest, "saved": saved.state.version if saved else None},
    )
    return TrainerState(
        version=newest,
        cursor=Cursor(last.stream_to),
        step_start=last.stream_from,
        previous_start=manifests[-2].stream_from if len(manifests) > 1 else last.stream_from,
        kept=saved.state.kept if saved else {},
    )


def _anchored(store: ChunkStore, run_id: RunId, version: PolicyVersion, root: Hash32) -> Manifest:
    manifest = _manifest(store, run_id, version)
    if manifest.root() != root:
        raise StorageError(
            f"version {version} in the store is not the one on chain",
            hint="restore the trainer's --store folder",
        )
    return manifest


def _manifest(store: ChunkStore, run_id: RunId, version: PolicyVersion) -> Manifest:
    manifest = store.manifest(run_id, version)
    if manifest is None or not store.is_complete(run_id, version):
        raise StorageError(
            f"version {version} is on chain, but neither the state folder nor the store has it",
            hint="restore the trainer's --state-dir or --store folder, or fetch it from a relay",
        )
    return manifest


def _unpack(store: ChunkStore, manifest: Manifest, shelf: PolicyShelf) -> None:
    """Write a version's files to the shelf from their chunks."""
    with fresh_folder(shelf.path(manifest.version)) as fresh:
        store.unpack(manifest, fresh)
