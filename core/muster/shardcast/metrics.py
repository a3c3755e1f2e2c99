"""All names of an origin's or relay's Prometheus metrics, with units."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class ShardMetrics:
    """Counters of one server, and of the mirror that fills its store if there is one."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter(
            "requests", "HTTP requests by what was asked for and status.", ("kind", "status")
        )
        self.sent_bytes = self._counter("sent_bytes", "Bytes of chunks sent.")
        self.cut_off = self._counter(
            "cut_off", "Connections closed by reason: slow, too_many, displaced.", ("reason",)
        )
        self.connections = self._gauge("connections", "Open connections.")
        self.waiting = self._gauge("waiting_requests", "Requests that wait for something to come.")
        self.policy_version = self._gauge("policy_version", "Newest version held whole.")
        self.stored_bytes = self._gauge("stored_bytes", "Bytes of mirrored chunks on disk.")
        self.received_bytes = self._counter(
            "received_bytes", "Verified bytes of chunks by upstream.", ("upstream",)
        )
        self.upstream_faults = self._counter(
            "upstream_faults", "Failed requests: absent, failed, lied, slow.", ("upstream", "fault")
        )
        self.mirrored = self._counter("mirrored_versions", "Versions mirrored whole.")

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"muster_shardcast_{name}_total", meaning, labels, registry=self._registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"muster_shardcast_{name}", meaning, registry=self._registry)
