"""Settings of the orchestrator process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from muster.protocol.ids import Address, to_address
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Confirmations, Settings

EvaluatorAddress = Annotated[Address, AfterValidator(to_address)]
"""An address, written in any case."""


class OrchestratorSettings(Settings):
    """How one orchestrator serves one run."""

    run: Annotated[int, Field(ge=1)]
    """The run it serves."""
    keystore: Path
    """Encrypted key of the run's orchestrator account."""
    password_file: Path | None = None
    """File with the keystore's password; else MUSTER_PASSWORD."""
    rpc: str = DEFAULT_RPC
    """JSON-RPC endpoint of the chain."""
    deployments: Path = DEPLOYMENTS
    """Folder of deployment files, one per chain id."""
    documents: Path = Path("documents")
    """Folder with recipe, calibration and task set, each named by its hash."""
    files: Path = Path("files")
    """Folder of submission files, of what the database is rebuilt from, and of the journal of
    transactions."""
    bucket: str = ""
    """`s3://bucket/prefix` for submission files and what the database is rebuilt from, instead of
    the folder; keys, region and endpoint come from AWS_* in the environment."""
    retention_s: Annotated[int, Field(ge=0)] | None = None
    """Seconds for which a submission's file is kept once its outcome is final, no case or slash
    about it is open and no step may train on it, or its batch is void; None for ever."""
    database: str | Path = Path("orchestrator.sqlite3")
    """SQLite file, or the `postgresql://` URL of a database that replicas share; either may be
    deleted while nothing uses it."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8600
    """Port to listen on; 0 for any free one."""
    admin_socket: Path | None = None
    """Unix socket for the owner's commands (`muster orchestrator admin`); None for none."""
    ready_file: Path | None = None
    """File that receives the URL once the process listens."""
    origin: str = ""
    """URL where the trainer serves policy weights."""
    relays: tuple[str, ...] = ()
    """URLs of relays that mirror them."""
    evaluators: tuple[EvaluatorAddress, ...] = ()
    """Addresses that may report evaluations besides the run's owner and its trainer."""
    tokenizer: Path | None = None
    """The base model's tokenizer.json, for samples to be read as text; None for that of the
    versions that origin and relays serve."""
    public_rpc: tuple[str, ...] = ()
    """RPC endpoints that newcomers are told of; none that holds a key of yours."""
    public_url: str = ""
    """This orchestrator's URL as newcomers reach it; empty for the one they asked."""
    lease_s: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Seconds from lease to deadline."""
    dead_after_s: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Seconds of silence after which a worker is dead, and its leases hold back nobody; after a
    quarter of them it is unhealthy."""
    call_timeout_s: Annotated[int, Field(ge=1)] | None = None
    """Seconds after which a validator that was called for a batch and is silent is replaced; None
    for an eighth of the chain's outcome deadline, which is the longest."""
    retry_after_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """What a node is told to wait when there is no work."""
    commit_interval_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Least time between two batch commitments."""
    batch_limit: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most submissions in a batch."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Time between two reads of the chain."""
    confirmations: Confirmations = 0
    """Blocks on top of an event before it is acted on; or `safe` or `finalized`, where the chain
    has such blocks."""
    rate_per_signer: Annotated[float, Field(gt=0)] = 100.0
    """Signed requests per second of one signer, sustained; bursts may be twice that."""
    rate_per_host: Annotated[float, Field(gt=0)] = 1000.0
    """Requests per second of one network address, sustained; bursts may be twice that."""
    bytes_per_signer: Annotated[float, Field(gt=0)] = 32.0 * (1 << 20)
    """Bytes per second that one signer sends and is sent, sustained; bursts may be eight seconds'
    worth."""
    bytes_per_host: Annotated[float, Field(gt=0)] = 256.0 * (1 << 20)
    """Bytes per second of one network address, sustained; bursts may be eight seconds' worth."""
    trusted_proxies: str = ""
    """Addresses and networks of reverse proxies whose X-Forwarded-For counts, separated by
    commas."""
    max_listeners: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Most open event streams; for one more, the oldest ends of the network and address that has
    most."""
    max_listeners_per_host: Annotated[int, Field(ge=1)] = 16
    """Most open event streams of one network address; more are answered 429."""
    max_connections: Annotated[int, Field(ge=1)] = 2000
    """Most open connections; for one more, that one is closed which is waited for longest of the
    network and address that has most. Connections that somebody with a role in the run has signed
    on, up to three quarters of all and 16 of one signer, stay."""
    max_connections_per_host: Annotated[int, Field(ge=1)] = 512
    """Most open connections of one network address that is no trusted proxy and has signed nothing
    on them; for one more, the one is closed which is waited for longest."""
    header_timeout_s: Annotated[float, Field(gt=0)] = 15.0
    """How long a request's headers may take to arrive."""
    body_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a request's body may take to arrive."""
    read_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a peer may leave an answer unread."""
