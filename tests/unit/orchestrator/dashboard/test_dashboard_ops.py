"""Prometheus: gauges have the present values, and alerts and Grafana use existing names."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from orchestrator_bench import Bench
from orchestrator_fakes import RUN

from muster.orchestrator.metrics import (
    FRESH_S,
    HEARTBEATS,
    REGISTRY,
    TRAINING_FIGURES,
    MetricsText,
)
from muster.protocol.eip712 import address_of
from muster.protocol.ids import Address
from muster.protocol.messages import Reason, Verdict
from muster.shardcast.metrics import ShardMetrics
from muster.trainer.measure.figures import EVALUATION, PREFIX, STEP

OPS = Path(__file__).parents[4] / "ops"
ALERTS = OPS / "prometheus" / "alerts.yml"
GRAFANA = OPS / "grafana" / "muster-run.json"
WANTED = {"CollapseSignature", "ValidatorAbsent", "RejectRateSpike", "ManyWorkersFailOneCheck"}
WANTED |= {"SlashingPaused"}


def rules() -> list[dict[str, object]]:
    return [r for g in yaml.safe_load(ALERTS.read_text())["groups"] for r in g["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every PromQL expression with its place."""
    for rule in rules():
        yield str(rule["alert"]), str(rule["expr"])
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def known_metrics() -> dict[str, set[str]]:
    """Return the labels of every sample that the processes expose, by its name."""
    known: dict[str, set[str]] = {PREFIX + figure: set() for figure in (*STEP, *EVALUATION)}
    for registry in (REGISTRY, ShardMetrics()._registry):
        for collector in registry._collector_to_names:
            labels = set(getattr(collector, "_labelnames", ()))
            for name in registry._collector_to_names[collector]:
                known[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return known


def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    known, everywhere = known_metrics(), {"job", "instance"}
    asked = 0
    for where, expression in expressions():
        for name, matchers in re.findall(r"(muster_\w+)(?:\{([^}]*)\})?", expression):
            assert name in known, f"{where}: {name}"
            labels = set(re.findall(r"(\w+)\s*(?:=|!|=~)", matchers))
            assert labels <= known[name] | everywhere, f"{where}: {labels}"
            asked += 1
    assert asked > 40


def test_every_figure_that_is_asked_for_is_passed_on() -> None:
    for where, expression in expressions():
        for figure in re.findall(r'figure="(\w+)"', expression):
            assert figure in TRAINING_FIGURES, where
    assert set(TRAINING_FIGURES) <= {*STEP, *EVALUATION}


@pytest.mark.parametrize("pair", ["()", "[]", "{}"])
def test_brackets_of_expressions_are_balanced(pair: str) -> None:
    for where, expression in expressions():
        assert expression.count(pair[0]) == expression.count(pair[1]), where


def test_alerts_say_what_was_seen_and_what_to_do() -> None:
    names = [str(rule["alert"]) for rule in rules()]
    assert len(names) == len(set(names))
    assert set(names) >= WANTED
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "action"}  # type: ignore[call-overload]
        assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"})
        assert re.fullmatch(r"\d+[smh]", str(rule.get("for", "1m")))


def test_grafana_panels_do_not_overlap() -> None:
    board = json.loads(GRAFANA.read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert max(x for x, _ in cells) < 24


def test_scrape_configuration_names_the_rules() -> None:
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS.name]
    assert "muster-orchestrator" in {job["job_name"] for job in config["scrape_configs"]}


# ------------------------------------------------------------------------- gauges


async def scrape(bench: Bench) -> dict[str, float]:
    async with bench.http() as http:
        text = (await http.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


async def test_gauges_tell_verdicts_reasons_and_slashes(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    bench.set_chain_time(bench.network.chain.time + 50)
    waiting = await scrape(bench)
    assert waiting["muster_orchestrator_unjudged_batches"] == 1
    assert waiting["muster_orchestrator_oldest_unjudged_seconds"] == 50
    await bench.judge(1, [submission], Verdict.FRAUD, Reason.SAMPLER_MISMATCH)
    await bench.record()
    await bench.settle()
    bench.services.metrics_text = MetricsText()
    found = await scrape(bench)
    for name in (
        'verdicts{verdict="fraud"}',
        'reasons{reason="sampler_mismatch"}',
        'reason_workers{reason="sampler_mismatch"}',
        'workers{status="banned"}',
        'slashes{state="escrowed"}',
    ):
        assert found[f"muster_orchestrator_{name}"] == 1
    assert found["muster_orchestrator_oldest_unjudged_seconds"] == 0


async def test_absent_validators_are_told_from_diligent_ones(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    bench.wall.time += 1000
    await bench.judge(1, [submission], validators=(0, 1))
    called = [address_of(bench.network.keys.validators[n]) for n in bench.order(1)]
    bench.network.apply("RunRegistry", "ValidatorUnseated", run_id=RUN, validator=called[1])
    found = await scrape(bench)

    def silent(validator: Address) -> float | None:
        return found.get(f'muster_orchestrator_validator_signed_seconds{{validator="{validator}"}}')

    assert [silent(validator) for validator in called] == [0, None, 1000]


async def test_validator_that_let_a_call_pass_is_absent_until_it_speaks(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    await bench.judge(1, [submission], validators=(0,))
    bench.set_chain_time(bench.network.view.batches[1].committed_at + 125)
    called = [address_of(bench.network.keys.validators[n]) for n in bench.order(1)]

    async def absent() -> list[float]:
        found = await scrape(bench)
        name = "muster_orchestrator_validator_absent"
        return [found[f'{name}{{validator="{validator}"}}'] for validator in called]

    assert await absent() == [0, 1, 0]
    assert (await bench.services.status.build()).absent_validators == [called[1]]
    await bench.judge(1, [submission], validators=(1,))
    bench.services.metrics_text = MetricsText()
    assert await absent() == [0, 0, 0]


async def test_trainers_figures_are_passed_on(bench: Bench) -> None:
    await bench.services.training.report(3, {"entropy": 0.5, "alarm_steps": 2.0})
    found = await scrape(bench)
    assert found['muster_orchestrator_training{figure="entropy"}'] == 0.5
    assert found['muster_orchestrator_training{figure="alarm_steps"}'] == 2


async def test_a_step_that_trained_on_nothing_is_a_gap(bench: Bench) -> None:
    await bench.services.training.report(3, {"entropy": 0.5, "reward": 0.25, "tokens": 7.0})
    await bench.services.training.report(4, {"reward": 0.125, "tokens": 0.0})
    found = await scrape(bench)
    assert math.isnan(found['muster_orchestrator_training{figure="entropy"}'])
    assert found['muster_orchestrator_training{figure="reward"}'] == 0.125


async def test_metrics_are_built_once_in_five_seconds_however_many_ask(bench: Bench) -> None:
    now_s = 0.0
    metrics = MetricsText(lambda: now_s)
    first = await metrics.read(bench.services)
    HEARTBEATS.inc()
    now_s = FRESH_S - 0.01
    assert await metrics.read(bench.services) is first
    now_s = FRESH_S
    assert await metrics.read(bench.services) != first
