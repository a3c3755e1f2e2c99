"""Settings of the orchestrator process."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from muster.protocol.ids import Address, to_address
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Confirmations, Listed, Settings, Urls

EvaluatorAddress = Annotated[Address, AfterValidator(to_address)]
"""An address in any letter case."""


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
    """Folder of submission files, of the sources for rebuilding the database, and of the journal of
    transactions."""
    bucket: str = ""
    """`s3://bucket/prefix` for submission files and the sources for rebuilding the database,
    instead of the folder; keys, region and endpoint come from AWS_* in the environment."""
    retention_s: Annotated[int, Field(ge=0)] | None = None
    """Seconds for which a submission's file is kept after nobody can need it: its outcome is final,
    no case or slash about it is open and no step may train on it, or its batch is void. None keeps
    it forever."""
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
    """URL at which the trainer serves policy weights."""
    relays: Urls = ()
    """URLs of relays that mirror the origin. Nodes fetch policies from them, put files of cases
    into their rooms, and name them on chain as sources; at a run's end the trainer waits until they
    have the last version."""
    evaluators: Annotated[tuple[EvaluatorAddress, ...], Listed] = ()
    """Addresses that may report evaluations besides the run's owner and its trainer."""
    tokenizer: Path | None = None
    """The base model's tokenizer.json, to show samples as text; None to fetch it from origin and
    relays."""
    public_rpc: Urls = ()
    """RPC endpoints published to newcomers; do not name one whose URL contains a secret key."""
    public_url: str = ""
    """This orchestrator's public URL; empty for the one that the newcomer used."""
    lease_s: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Seconds from lease to deadline."""
    dead_after_s: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Seconds of silence after which a worker is dead and its leases use no capacity; after a
    quarter of this time it is unhealthy."""
    call_timeout_s: Annotated[int, Field(ge=1)] | None = None
    """Seconds after which a silent validator that was called for a batch is replaced; None for an
    eighth of the chain's outcome deadline, which is also the maximum."""
    retry_after_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds that a node is told to wait when there is no work."""
    commit_interval_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Minimum seconds between two batch commitments."""
    batch_limit: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most submissions in a batch. If nobody judges it, its workers take their work out, one a
    block; it may have no more than the challenge window has blocks."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds between two polls of the chain."""
    confirmations: Confirmations = 0
    """Blocks on top of an event before it is acted on; or `safe` or `finalized`, where the chain
    has such blocks."""
    rate_per_signer: Annotated[float, Field(gt=0)] = 100.0
    """Signed requests per second of one signer, sustained; bursts may be twice that."""
    rate_per_host: Annotated[float, Field(gt=0)] = 1000.0
    """Requests per second of one network address, sustained; bursts may be twice that."""
    bytes_per_signer: Annotated[float, Field(gt=0)] = 32.0 * (1 << 20)
    """Bytes per second that one signer sends and receives, sustained; bursts may be eight seconds'
    worth."""
    bytes_per_host: Annotated[float, Field(gt=0)] = 256.0 * (1 << 20)
    """Bytes per second of one network address, sustained; bursts may be eight seconds' worth."""
    trusted_proxies: str = ""
    """Addresses and networks of reverse proxies whose X-Forwarded-For counts, separated by
    commas."""
    max_listeners: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Most open event streams. When another opens, the oldest stream of the network and address
    with most streams is closed."""
    max_listeners_per_host: Annotated[int, Field(ge=1)] = 16
    """Most open event streams of one network address; more are answered 429."""
    max_connections: Annotated[int, Field(ge=1)] = 2000
    """Most open connections. When another opens, the network and address with most connections
    loses the one that has waited longest for its peer. Connections with a signed request of someone
    with a role in the run are kept, up to three quarters of all and 16 of one signer."""
    max_connections_per_host: Annotated[int, Field(ge=1)] = 512
    """Most open connections without a signed request from one network address that is not a trusted
    proxy. When another opens, the one that has waited longest for its peer is closed."""
    header_timeout_s: Annotated[float, Field(gt=0)] = 15.0
    """Deadline in seconds for a request's headers."""
    body_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Deadline in seconds for a request's body."""
    read_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that a peer may leave an answer unread."""
