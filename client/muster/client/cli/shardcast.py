"""`muster shardcast`: broadcast any large file with a signature instead of a chain.

    publish   cut files into chunks, sign the manifest, serve them
    relay     mirror what a signer published, and serve it
    fetch     get a version from relays, verified chunk by chunk
    ls        what a server or a store holds
    verify    hash the files on a disk again

`muster relay run` is the relay of a training run, which takes its roots from the chain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import parse_account, together
from muster.client.relay import announce, limits_of, read_token
from muster.lifecycle import run_until_stopped
from muster.protocol.errors import ConfigError, EncodingError, PolicyUnavailable, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, to_hash32
from muster.telemetry import setup_logging
from muster.wallet import open_wallet

if TYPE_CHECKING:
    from muster.shardcast import ChunkStore, Manifest, Relay
    from muster.shardcast.fetcher import Progress
    from muster.shardcast.metrics import ShardMetrics


PATH = click.Path(path_type=Path)
OF_A_RUN = "a training run signs its versions for its chain: use muster model fetch, or give --root"
"""The hint when no relay has a version that the signer signed."""


serving_options = together(
    click.option("--host", default="127.0.0.1", help="Address to listen on."),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8700,
        help="Port to listen on; 0 for any free one.",
    ),
    click.option("--token-file", type=PATH, help="Bearer token that clients must show."),
    click.option(
        "--connections-per-address",
        type=click.IntRange(min=1),
        default=128,
        help="Most open connections per address.",
    ),
    click.option(
        "--requests-per-s",
        type=click.FloatRange(min=0.1),
        default=500.0,
        help="Most requests per second and address.",
    ),
    click.option("--ready-file", type=PATH, help="Write the URL here once it listens."),
)
"""Options of the commands that serve."""


RUN = click.option("--run", "run_id", type=click.IntRange(min=1), default=1, help="Run.")


@click.group()
def shardcast() -> None:
    """Broadcast large files, verified chunk by chunk."""


@shardcast.command()
@click.argument("paths", nargs=-1, required=True, type=PATH)
@click.option("--store", type=PATH, required=True, help="Folder for chunks and manifests.")
@click.option("--keystore", type=PATH, required=True, help="Key that signs; see muster wallet new.")
@click.option("--password-file", type=PATH, help="Password; else MUSTER_PASSWORD, else ask.")
@RUN
@click.option("--version", type=click.IntRange(min=0), help="Policy version. [default: the next]")
@click.option("--keep", type=click.IntRange(min=1), default=5, help="Newest versions that stay.")
@click.option("--link", is_flag=True, help="Share disk space: never rewrite the files in place.")
@click.option("--serve", is_flag=True, help="Go on serving the store until stopped.")
@serving_options
def publish(
    paths: tuple[Path, ...],
    store: Path,
    keystore: Path,
    password_file: Path | None,
    run_id: int,
    version: int | None,
    keep: int,
    link: bool,
    serve: bool,
    **serving: Any,
) -> None:
    """Publish files, a folder, or a safetensors index with all its files.

    \b
    Example:
      muster shardcast publish model.safetensors --store ./origin --keystore key.json --serve
    """
    from muster.shardcast import ChunkStore, publish as publish_files

    wallet = open_wallet(keystore, password_file)
    held = ChunkStore(store, keep=keep)
    manifest = publish_files(
        paths,
        held,
        key=wallet.key,
        run_id=RunId(run_id),
        version=None if version is None else PolicyVersion(version),
        link=link,
    )
    click.echo(_line(manifest))
    click.echo(f"signed by {wallet.address}", err=True)
    if serve:
        _serve_until_stopped(held, None, serving)


@shardcast.command()
@click.option(
    "--upstream", multiple=True, required=True, help="URL of origin or relay; repeatable."
)
@click.option("--signer", required=True, help="Address whose versions are mirrored.")
@click.option("--store", type=PATH, required=True, help="Folder for chunks and manifests.")
@RUN
@click.option("--keep", type=click.IntRange(min=1), default=5, help="Newest versions that stay.")
@click.option("--max-bytes", type=click.IntRange(min=1), help="Most bytes of chunks.")
@click.option("--upstream-token-file", type=PATH, help="Bearer token that upstreams demand.")
@serving_options
def relay(
    upstream: tuple[str, ...],
    signer: str,
    store: Path,
    run_id: int,
    keep: int,
    max_bytes: int | None,
    upstream_token_file: Path | None,
    **serving: Any,
) -> None:
    """Mirror what a signer published, and serve it, until stopped.

    \b
    Example:
      muster shardcast relay --upstream http://origin:8700 --signer 0x... --store ./relay
    """
    from muster.shardcast import ChunkStore, Relay
    from muster.shardcast.metrics import ShardMetrics
    from muster.shardcast.trust import trust_signer

    setup_logging("relay")
    held = ChunkStore(store, keep=keep, max_bytes=max_bytes)
    trust = trust_signer(parse_account(signer))
    metrics = ShardMetrics()
    token = read_token(upstream_token_file)

    def mirror() -> Relay:
        return Relay(upstream, held, run_id=RunId(run_id), trust=trust, token=token,
                     metrics=metrics)  # fmt: skip

    _serve_until_stopped(held, mirror, serving, metrics)


@shardcast.command()
@click.option("--relay", multiple=True, help="URL of a relay; repeatable.")
@click.option("--origin", multiple=True, help="URL asked only when every relay fails; repeatable.")
@click.option("--signer", help="Address whose versions are believed.")
@click.option("--root", help="Root that the version's manifest must have, in place of a signer.")
@click.option("--into", type=PATH, required=True, help="Folder that keeps fetched versions.")
@RUN
@click.option("--version", type=click.IntRange(min=0), help="Policy version. [default: newest]")
@click.option(
    "--wait-s",
    type=click.IntRange(0, 3600),
    default=10,
    help="Longest wait for a version that is still to come.",
)
@click.option("--token-file", type=PATH, help="Bearer token that the relays demand.")
def fetch(
    relay: tuple[str, ...],
    origin: tuple[str, ...],
    signer: str | None,
    root: str | None,
    into: Path,
    run_id: int,
    version: int | None,
    wait_s: int,
    token_file: Path | None,
) -> None:
    """Fetch a version and print the folder it is in; resumes what was interrupted.

    \b
    Example:
      muster shardcast fetch --relay http://relay:8700 --signer 0x... --into ./models
    """
    from muster.shardcast import fetch as fetch_files

    async def run() -> Path:
        with progress_bar() as progress:
            try:
                return await fetch_files(
                    relay,
                    into,
                    signer=parse_account(signer) if signer else None,
                    root=_root(root) if root else None,
                    run_id=RunId(run_id),
                    version=None if version is None else PolicyVersion(version),
                    reserve=origin,
                    token=read_token(token_file),
                    wait_s=wait_s,
                    progress=progress,
                )
            except PolicyUnavailable as error:
                if signer:
                    error.hint = OF_A_RUN
                raise

    click.echo(str(asyncio.run(run())))


@shardcast.command()
@click.argument("place")
@RUN
@click.option("--token-file", type=PATH, help="Bearer token that the server demands.")
def ls(place: str, run_id: int, token_file: Path | None) -> None:
    """List the versions that a server (URL) or a store (folder) holds, newest first.

    \b
    Example:
      muster shardcast ls http://relay:8700
    """
    if place.startswith(("http://", "https://")):
        manifests = asyncio.run(_remote_manifests(place, RunId(run_id), read_token(token_file)))
    else:
        manifests = _local_manifests(Path(place), RunId(run_id))
    for manifest in manifests:
        click.echo(_line(manifest))


@shardcast.command()
@click.argument("folder", type=PATH)
@click.option("--root", help="Root that the manifest must have; of a store, check that version.")
def verify(folder: Path, root: str | None) -> None:
    """Hash a fetched folder, or a whole store, again; exit code 1 when anything is damaged.

    \b
    Example:
      muster shardcast verify policies/1/v3
    """
    from muster.shardcast import ChunkStore
    from muster.shardcast.simple import check_folder, check_store, is_store, read_manifest

    wanted = None if root is None else _root(root)
    if is_store(folder):
        findings = list(check_store(ChunkStore(folder), wanted))
        if wanted is not None and not findings:
            raise StorageError(
                f"no version in {folder} has the root {root}",
                hint=f"`muster shardcast ls {folder} --run N` shows the roots of a run",
            )
    else:
        found = read_manifest(folder).root()
        if wanted is not None and found != wanted:
            raise StorageError(f"the manifest's root is 0x{found.hex()}, not {root}")
        findings = list(check_folder(folder))
    for item in findings:
        state = f"{item.damaged} of {item.chunks} chunks damaged" if item.damaged else "ok"
        click.echo(f"run {item.run_id} version {item.version} {item.name}: {state}")
    bad = sum(item.damaged for item in findings)
    if bad:
        raise StorageError(f"{bad} chunks are damaged", hint="fetch the version again")


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show received bytes, rate and time left on stderr while the context lasts."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Display,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Display(*columns, console=Console(stderr=True)) as display:
        task = display.add_task("fetch", total=None)
        yield lambda held, total: display.update(task, completed=held, total=total)


def _serve_until_stopped(
    store: ChunkStore,
    mirror: Callable[[], Relay] | None,
    serving: dict[str, Any],
    metrics: ShardMetrics | None = None,
) -> None:
    from muster.shardcast import ShardServer

    limits = limits_of(serving["connections_per_address"], serving["requests_per_s"])

    async def serve() -> None:
        running = mirror() if mirror else None
        server = ShardServer(
            store,
            serving["host"],
            serving["port"],
            limits=limits,
            token=read_token(serving["token_file"]),
            wanted=running.wanted if running else None,
            metrics=metrics,
        )
        async with server:
            announce(server, "relay" if running else "origin", serving["ready_file"])
            if running is not None:
                await running.recheck()
                await running.run()
            await asyncio.Event().wait()

    run_until_stopped(serve)


async def _remote_manifests(url: str, run_id: int, token: str | None) -> list[Manifest]:
    from muster.shardcast import Manifest
    from muster.shardcast.download import RelayFault, ShardClient
    from muster.shardcast.http_client import require_url

    client, url = ShardClient(token=token), require_url(url)
    try:
        versions = await client.versions(url, RunId(run_id))
        if isinstance(versions, RelayFault):
            raise PolicyUnavailable(f"{url} does not answer as a relay does ({versions.value})")
        answers = [await client.any_manifest(url, RunId(run_id), v) for v in versions]
        return [Manifest.from_bytes(data) for data in answers if not isinstance(data, RelayFault)]
    except EncodingError as error:
        raise PolicyUnavailable(f"{url} lists a malformed manifest: {error}") from error
    finally:
        client.close()


def _local_manifests(folder: Path, run_id: int) -> list[Manifest]:
    from muster.shardcast import ChunkStore
    from muster.shardcast.simple import is_store

    if not is_store(folder):
        raise ConfigError(f"{folder} is not a store", hint="give a relay's URL or its --store")
    store = ChunkStore(folder)
    found = [store.manifest(RunId(run_id), v) for v in store.versions(RunId(run_id))]
    return [manifest for manifest in found if manifest is not None]


def _line(manifest: Manifest) -> str:
    return (
        f"run {manifest.run_id} version {manifest.version}: {manifest.total_bytes} bytes in "
        f"{len(manifest.files)} files, {sum(1 for _ in manifest.spans())} chunks, "
        f"root 0x{manifest.root().hex()}"
    )


def _root(text: str) -> Hash32:
    try:
        return to_hash32(text)
    except EncodingError as error:
        hint = "write 0x and 64 hexadecimal digits"
        raise ConfigError(f"not a root: {text}", hint=hint) from error
