"""Names of the orchestrator's Prometheus metrics, all of them, with units."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
_PREFIX = "muster_orchestrator_"


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"{_PREFIX}{name}_total", meaning, labels, registry=REGISTRY)


def _gauge(name: str, meaning: str, *labels: str) -> Gauge:
    return Gauge(f"{_PREFIX}{name}", meaning, labels, registry=REGISTRY)


REQUESTS = _counter("requests", "HTTP requests by route and status.", "route", "status")
REQUEST_SECONDS = Histogram(
    "muster_orchestrator_request_seconds",
    "Time to answer a request.",
    ("route",),
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    registry=REGISTRY,
)
HEARTBEATS = _counter("heartbeats", "Verified heartbeats.")
LEASES = _counter(
    "leases", "Requests for work by answer: ticket, none, unit_cap or unfunded.", "answer"
)
SUBMISSIONS = _counter("submissions", "Submissions received.")
UPLOAD_BYTES = _counter("upload_bytes", "Bytes of submissions received.")
OUTCOMES = _counter("outcomes", "Outcomes received from validators.")
REAUDITS = _counter(
    "reaudits",
    "Outcomes received for batches whose outcomes were posted: agreed or differed.",
    "result",
)
TRANSACTIONS = _counter(
    "transactions", "Transactions by kind and result: mined, refused or lost.", "kind", "result"
)
VERDICTS = _gauge("verdicts", "Submissions with an outcome on chain, by verdict.", "verdict")
REASONS = _gauge(
    "reasons", "Submissions that were not accepted, by reason of the outcome on chain.", "reason"
)
REASON_WORKERS = _gauge(
    "reason_workers",
    "Workers with at least one submission that was not accepted for the reason.",
    "reason",
)
WORKERS = _gauge("workers", "Registered workers by status.", "status")
WORKER_STATES = _gauge(
    "worker_states",
    "Registered workers by the state of their life: discovered, active, unhealthy, dead, jailed, "
    "exiting or banned.",
    "state",
)
NODES_ALIVE = _gauge("nodes_alive", "Nodes that sent a heartbeat within two minutes.")
SLASHES = _gauge("slashes", "Slashes on chain by state.", "state")
SLASHING_PAUSED_SECONDS = _gauge(
    "slashing_paused_seconds", "Time until the pause of slashing ends; 0 while slashing runs."
)
CORRELATED_FAILURE = _gauge(
    "correlated_failure",
    "Number of the check that many independent workers fail, whose slashes wait; 0 for none.",
)
OPEN_CASES = _gauge("open_cases", "Disputes that are not closed.")
STEP = _gauge("step", "Training step whose submissions are being collected.")
POLICY_VERSION = _gauge("policy_version", "Newest policy version on chain.")
UNJUDGED_BATCHES = _gauge("unjudged_batches", "Committed batches without outcomes.")
CALLED_BATCHES = _gauge(
    "called_batches",
    "Batches for which outcomes are due, by how many validators they need: quorum, escalated, all.",
    "stage",
)
OLDEST_UNJUDGED_SECONDS = _gauge(
    "oldest_unjudged_seconds",
    "Time since the oldest batch without outcomes was committed; 0 without one.",
)
WAITING_SUBMISSIONS = _gauge(
    "waiting_submissions", "Submissions received that are in no batch yet."
)
OPEN_LEASES = _gauge("open_leases", "Tickets that wait for their submission.")
PENDING_TRANSACTIONS = _gauge("pending_transactions", "Sent and not mined.")
VALIDATOR_SIGNED_SECONDS = _gauge(
    "validator_signed_seconds",
    "Time since outcomes with a seated validator's signature were received.",
    "validator",
)
VALIDATOR_ABSENT = _gauge(
    "validator_absent",
    "Whether a seated validator let the time of a call pass and was not heard of since: 1, or 0.",
    "validator",
)
TRAINING = _gauge(
    "training",
    "The trainer's newest figures, by their names in docs/reference/metrics.md.",
    "figure",
)
BLOCK = _gauge("block", "Block up to which the chain is read.")
CHAIN_READ_SECONDS = _gauge("chain_read_seconds", "Time since the chain's endpoint answered.")
CHAIN_TIME_SECONDS = _gauge("chain_time_seconds", "Unix time of the latest block read.")
LISTENERS = _gauge("listeners", "Open streams of server-sent events.")
IS_LEADER = _gauge("is_leader", "Whether this replica writes to the chain: 1, or 0.")
