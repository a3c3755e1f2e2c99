"""Broadcast of any large files by signature alone, without a chain: publish here, fetch there.

manifest = publish([Path("model.safetensors")], Path("store"), key=key)
folder = asyncio.run(fetch(["http://relay:8700"], Path("cache"), signer=address))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muster.protocol.errors import ConfigError, PolicyUnavailable
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.shardcast.fetcher import Fetcher, Progress
from muster.shardcast.inputs import chunk_bytes_for, files_of
from muster.shardcast.manifest import Manifest
from muster.shardcast.store import ChunkStore
from muster.shardcast.trust import sign_root, trust_signer

FIRST_RUN = RunId(1)
"""The run of those who have only one."""


def publish(
    paths: Sequence[Path],
    store: ChunkStore | Path,
    *,
    key: bytes,
    run_id: RunId = FIRST_RUN,
    version: PolicyVersion | None = None,
    link: bool = False,
) -> Manifest:
    """Publish files as the next version of a run, signed with a key; returns the manifest.

    `paths` are files, folders of files, or safetensors indexes; see `ChunkStore.publish` for `link`
    and for what is raised, beside ConfigError for unfit paths. Whoever serves the store, in this
    process or another, offers the version at once. Blocks until it is on the disk.
    """
    store = store if isinstance(store, ChunkStore) else ChunkStore(store)
    files = files_of(paths)
    if version is None:
        version = PolicyVersion(max(store.stored_versions(run_id), default=-1) + 1)
    number = version
    return store.publish(
        files,
        run_id=run_id,
        version=number,
        stream_from=0,
        stream_to=0,
        sign=lambda root: sign_root(key, run_id, number, root),
        chunk_bytes=chunk_bytes_for(list(files.values())),
        link=link,
    )


async def fetch(
    relays: Sequence[str],
    cache: Path,
    *,
    signer: Address | None = None,
    root: Hash32 | None = None,
    run_id: RunId = FIRST_RUN,
    version: PolicyVersion | None = None,
    reserve: Sequence[str] = (),
    token: str | None = None,
    wait_s: int = 10,
    progress: Progress | None = None,
) -> Path:
    """Return a folder with a version's verified files; without `version`, the newest offered.

    A version is believed when `signer` signed it, or when its manifest has the given `root`. A
    relay can hide the newest version, but not invent one. Raises ConfigError without either,
    PolicyUnavailable when no relay has it, StorageError when the disk refuses.
    """
    if (signer is None) == (root is None) or (root is not None and version is None):
        raise ConfigError("say whom to trust: a signer, or a version and its root")
    async with Fetcher(relays, cache, reserve=reserve, token=token, wait_s=wait_s) as fetcher:
        if version is None:
            version = await fetcher.newest(run_id, wait_s=wait_s)
        if version is None:
            raise PolicyUnavailable(
                f"no relay offers a version of run {run_id}",
                hint="check that the relays are running and reach the origin",
            )
        if root is None:
            assert signer is not None
            root = await fetcher.root_of(run_id, version, trust_signer(signer))
        return await fetcher.fetch(run_id, version, root, progress=progress)
