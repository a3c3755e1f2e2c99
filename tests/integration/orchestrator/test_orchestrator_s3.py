"""An orchestrator whose files are in S3-compatible storage."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from orchestrator_network import ORCHESTRATOR, VALIDATORS, Network, open_network, running
from s3_server import S3Server

from muster.client.sources import Signer, Sources
from muster.orchestrator.intake.blobs import S3Blobs
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError
from muster.protocol.messages import Submission


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with open_network(tmp_path) as opened:
        yield opened


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with S3Server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server.create("submissions") + "/run1"


async def test_files_are_fetched_from_the_bucket_and_the_database_is_rebuilt_from_it(
    network: Network, bucket: str
) -> None:
    async with running(network, bucket=bucket) as url:
        first = await network.upload(url, 0, b"rows")
        async with network.api(url, VALIDATORS[0]) as api:
            assert await api.file(first.file_hash) == b"rows"
        assert await asked_as_a_juror(network, url, first) == b"rows"
        await network.judge(url, first)
        await network.until(url, first, "judged")
        second = await network.upload(url, 1, b"more rows")
        assert list((network.folder / "files").glob("*.parquet")) == []
    for file in network.folder.glob("orchestrator.sqlite3*"):
        file.unlink()
    async with running(network, bucket=bucket) as url:
        await network.judge(url, second)
        await network.until(url, second, "judged")
        async with network.api(url, VALIDATORS[0]) as api:
            assert await api.file(second.file_hash) == b"more rows"
    assert await network.chain.ledger.batch_count() == 2


async def asked_as_a_juror(network: Network, url: str, submission: Submission) -> bytes:
    """Fetch a file as jurors, validators and workers do: from a source that redirects us."""
    domain = network.chain.domain("ContributionLedger")
    signer = Signer(VALIDATORS[0], domain, address_of(ORCHESTRATOR))
    async with Sources([url], signer=signer) as sources:
        return await sources.file(submission.file_hash)


async def test_storage_that_lies_is_noticed(network: Network, bucket: str) -> None:
    async with running(network, bucket=bucket) as url:
        submission = await network.upload(url, 0, b"rows")
        async with network.api(url, VALIDATORS[0]) as api:
            await S3Blobs(bucket).put({f"{submission.file_hash.hex()}.parquet": b"other rows"})
            with pytest.raises(ApiError, match="hashes to something else"):
                await api.file(submission.file_hash)
        with pytest.raises(ApiError, match="its file has another hash"):
            await asked_as_a_juror(network, url, submission)
