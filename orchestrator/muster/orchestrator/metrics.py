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
