"""Names of the orchestrator's Prometheus metrics, all of them, with units."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "muster_orchestrator_requests_total",
    "HTTP requests by route and status.",
    ("route", "status"),
    registry=REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "muster_orchestrator_request_seconds",
    "Time to answer a request.",
    ("route",),
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    registry=REGISTRY,
)
HEARTBEATS = Counter(
    "muster_orchestrator_heartbeats_total", "Verified heartbeats.", registry=REGISTRY
)
LEASES = Counter(
    "muster_orchestrator_leases_total",
    "Requests for work by answer: ticket, none, unit_cap or unfunded.",
    ("answer",),
    registry=REGISTRY,
)
SUBMISSIONS = Counter(
    "muster_orchestrator_submissions_total", "Submissions received.", registry=REGISTRY
)
UPLOAD_BYTES = Counter(
    "muster_orchestrator_upload_bytes_total", "Bytes of submissions received.", registry=REGISTRY
)
OUTCOMES = Counter(
    "muster_orchestrator_outcomes_total", "Outcomes received from validators.", registry=REGISTRY
)
REAUDITS = Counter(
    "muster_orchestrator_reaudits_total",
    "Outcomes received for batches whose outcomes were posted: agreed or differed.",
    ("result",),
    registry=REGISTRY,
)
TRANSACTIONS = Counter(
    "muster_orchestrator_transactions_total",
    "Transactions by kind and result: mined, refused or lost.",
    ("kind", "result"),
    registry=REGISTRY,
)
VERDICTS = Gauge(
    "muster_orchestrator_verdicts",
    "Submissions with an outcome on chain, by verdict.",
    ("verdict",),
    registry=REGISTRY,
)
REASONS = Gauge(
    "muster_orchestrator_reasons",
    "Submissions that were not accepted, by reason of the outcome on chain.",
    ("reason",),
    registry=REGISTRY,
)
REASON_WORKERS = Gauge(
    "muster_orchestrator_reason_workers",
    "Workers with at least one submission that was not accepted for the reason.",
    ("reason",),
    registry=REGISTRY,
)
WORKERS = Gauge(
    "muster_orchestrator_workers", "Registered workers by status.", ("status",), registry=REGISTRY
)
WORKER_STATES = Gauge(
    "muster_orchestrator_worker_states",
    "Registered workers by the state of their life: discovered, active, unhealthy, dead, jailed, "
    "exiting or banned.",
    ("state",),
    registry=REGISTRY,
)
NODES_ALIVE = Gauge(
    "muster_orchestrator_nodes_alive",
    "Nodes that sent a heartbeat within two minutes.",
    registry=REGISTRY,
)
SLASHES = Gauge(
    "muster_orchestrator_slashes", "Slashes on chain by state.", ("state",), registry=REGISTRY
)
SLASHING_PAUSED_SECONDS = Gauge(
    "muster_orchestrator_slashing_paused_seconds",
    "Time until the pause of slashing ends; 0 while slashing runs.",
    registry=REGISTRY,
)
CORRELATED_FAILURE = Gauge(
    "muster_orchestrator_correlated_failure",
    "Number of the check that many independent workers fail, whose slashes wait; 0 for none.",
    registry=REGISTRY,
)
OPEN_CASES = Gauge(
    "muster_orchestrator_open_cases", "Disputes that are not closed.", registry=REGISTRY
)
STEP = Gauge(
    "muster_orchestrator_step",
    "Training step whose submissions are being collected.",
    registry=REGISTRY,
)
POLICY_VERSION = Gauge(
    "muster_orchestrator_policy_version", "Newest policy version on chain.", registry=REGISTRY
)
UNJUDGED_BATCHES = Gauge(
    "muster_orchestrator_unjudged_batches",
    "Committed batches without outcomes.",
    registry=REGISTRY,
)
CALLED_BATCHES = Gauge(
    "muster_orchestrator_called_batches",
    "Batches for which outcomes are due, by how many validators they need: quorum, escalated, all.",
    ("stage",),
    registry=REGISTRY,
)
OLDEST_UNJUDGED_SECONDS = Gauge(
    "muster_orchestrator_oldest_unjudged_seconds",
    "Time since the oldest batch without outcomes was committed; 0 without one.",
    registry=REGISTRY,
)
WAITING_SUBMISSIONS = Gauge(
    "muster_orchestrator_waiting_submissions",
    "Submissions received that are in no batch yet.",
    registry=REGISTRY,
)
OPEN_LEASES = Gauge(
    "muster_orchestrator_open_leases", "Tickets that wait for their submission.", registry=REGISTRY
)
PENDING_TRANSACTIONS = Gauge(
    "muster_orchestrator_pending_transactions", "Sent and not mined.", registry=REGISTRY
)
VALIDATOR_SIGNED_SECONDS = Gauge(
    "muster_orchestrator_validator_signed_seconds",
    "Time since outcomes with a seated validator's signature were received.",
    ("validator",),
    registry=REGISTRY,
)
VALIDATOR_ABSENT = Gauge(
    "muster_orchestrator_validator_absent",
    "Whether a seated validator let the time of a call pass and was not heard of since: 1, or 0.",
    ("validator",),
    registry=REGISTRY,
)
TRAINING = Gauge(
    "muster_orchestrator_training",
    "The trainer's newest figures, by their names in docs/reference/metrics.md.",
    ("figure",),
    registry=REGISTRY,
)
BLOCK = Gauge(
    "muster_orchestrator_block", "Block up to which the chain is read.", registry=REGISTRY
)
CHAIN_READ_SECONDS = Gauge(
    "muster_orchestrator_chain_read_seconds",
    "Time since the chain's endpoint answered.",
    registry=REGISTRY,
)
CHAIN_TIME_SECONDS = Gauge(
    "muster_orchestrator_chain_time_seconds",
    "Unix time of the latest block read.",
    registry=REGISTRY,
)
LISTENERS = Gauge(
    "muster_orchestrator_listeners", "Open streams of server-sent events.", registry=REGISTRY
)
IS_LEADER = Gauge(
    "muster_orchestrator_is_leader",
    "Whether this replica writes to the chain: 1, or 0.",
    registry=REGISTRY,
)
