"""Every figure has its name and unit in one place, and reaches log, Prometheus and W&B."""

import math
import re
import subprocess
import sys
import textwrap
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_fakes import make_recipe, make_rollouts

from muster.api.routes import MAX_FIGURES
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion
from muster.protocol.mixture import MOST_PARTS, PartFilters, PartRecipe, TasksRecipe
from muster.trainer.measure.evaluate import Adherence, Estimate, Evaluation, PartShare
from muster.trainer.measure.figures import (
    EVALUATION,
    HELD_UP,
    PHASES,
    PREFIX,
    STEP,
    Durations,
    StepFigures,
    evaluation_entry,
    flat,
    meaning_of,
    shortage_figures,
    split_part,
    step_entry,
)
from muster.trainer.measure.metrics import PrometheusExport, log_to_wandb, serve_prometheus
from muster.trainer.recover.collapse import Alarm, StepDecision
from muster.trainer.stream.filters import Drop, PartTally, named
from muster.trainer.stream.reader import Cursor, Shortage, StepInput

PARTS = (PartRecipe(name="sums", filters=PartFilters(pool_window=2)),)
MIXED = make_recipe().model_copy(update={"tasks": TasksRecipe(parts=PARTS)})
ORCHESTRATOR_NAME = re.compile(r"^[a-z][a-z0-9_]{0,63}$")


def _figures() -> StepFigures:
    values: dict[str, Any] = dict.fromkeys(StepFigures.__dataclass_fields__, 1)
    changes = {"dropped": Counter({Drop.MISMATCH: 1}), "seconds": dict.fromkeys(PHASES, 0.25)}
    return StepFigures(**{**values, **changes})


def _taken() -> StepInput:
    dropped = Counter({drop: i for i, drop in enumerate(Drop, start=2)})
    groups = [make_rollouts(1, version=2)[:4], make_rollouts(1, version=4)[4:]]
    parts = {"sums": PartTally(groups=4, kept=1, samples=16, reward=8.0, tokens=40)}
    return StepInput(groups, dropped, Cursor(3), Cursor(9), reward=0.25, refill=2, parts=parts)


def _entry() -> dict[str, Any]:
    took = Durations(2.0, 0.5, dict.fromkeys(HELD_UP, 0.0))
    return step_entry(PolicyVersion(5), _taken(), _figures(), took, MIXED, peak_flops=8.0)


def _named(figures: Iterable[str]) -> set[str]:
    """Return documented names: P for a part, K for a number of samples."""
    return {re.sub(r"pass_at_\d+", "pass_at_K", split_part(name)[0]) for name in figures}


def _evaluation() -> dict[str, Any]:
    share = Estimate(0.5, 0.4, 0.6)
    return evaluation_entry(
        Evaluation(PolicyVersion(3), share, {1: share, 16: share}, 9, 1, 16, 4.0, 0.1,
                   Adherence(2.0, 0.5), {"sums": PartShare(share, 4)})
    )  # fmt: skip


def test_step_entry_has_exactly_the_documented_names() -> None:
    entry = _entry() | StepDecision(Alarm(), back_to=PolicyVersion(1)).entry()
    assert _named(flat(entry)) == STEP.keys()


def test_a_step_that_trained_on_nothing_has_no_figures_of_tokens() -> None:
    nothing = replace(_figures(), tokens=0, samples=0)
    entry = step_entry(PolicyVersion(5), _taken(), nothing, Durations(2.0, 1.0), make_recipe())
    unknown = {name for name, value in entry.items() if value is None}
    assert {"entropy", "grad_norm", "loss", "mean_ratio", "mismatch_kl", "kl"} <= unknown
    assert unknown.isdisjoint(flat(entry))
    assert flat(entry)["reward"] == 0.25
    assert None not in _entry().values()


def test_speed_is_work_over_the_time_without_waiting() -> None:
    entry = _entry()
    assert (entry["tokens_per_s"], entry["mfu"]) == (1 / 0.5, 1 / 0.5 / 8.0)
    unmeasured = step_entry(
        PolicyVersion(5), _taken(), _figures(), Durations(2.0, 0.5), make_recipe()
    )
    assert unmeasured["mfu"] is None


def test_part_has_means_over_its_own_groups_and_none_without_any() -> None:
    figures = flat(_entry())
    assert {name: figures[f"part_sums_{name}"] for name in ("reward", "kept", "length")} == {
        "reward": 0.5, "kept": 0.25, "length": 2.5,
    }  # fmt: skip
    none = replace(_taken(), parts={})
    entry = step_entry(PolicyVersion(5), none, _figures(), Durations(2.0, 0.5), MIXED)
    assert flat(entry)["part_sums_groups"] == 0
    assert "part_sums_reward" not in flat(entry)


def test_reasons_are_named_in_logs() -> None:
    assert named(Counter({Drop.STALE: 2, Drop.EASY: 1})) == {"easy": 1, "stale": 2}


def test_evaluation_entry_has_exactly_the_documented_names() -> None:
    assert _named(flat(_evaluation())) == EVALUATION.keys()


def test_orchestrator_takes_every_name_and_not_too_many() -> None:
    names = [f"{'p' * 31}{chr(97 + number)}" for number in range(MOST_PARTS)]
    entry = _entry()
    entry["part"] = dict.fromkeys(names, entry["part"]["sums"])
    evaluation = _evaluation()
    evaluation["eval"]["part"] = dict.fromkeys(names, evaluation["eval"]["part"]["sums"])
    for each in (entry, evaluation):
        figures = flat(each)
        assert len(figures) <= MAX_FIGURES
        assert all(ORCHESTRATOR_NAME.match(name) for name in figures)


def test_every_reason_to_drop_is_counted_whoever_dropped() -> None:
    entry = _entry()
    assert entry["dropped"].keys() == {str(drop) for drop in Drop}
    assert entry["dropped"]["mismatch"] == _taken().dropped[Drop.MISMATCH] + 1


def test_ages_are_counted_from_the_version_the_step_began_with() -> None:
    # Version 5 is made from 4; four samples each of versions 2 and 4.
    assert (_entry()["age_mean"], _entry()["age_max"]) == (1.0, 2)


def test_shortage_is_posted_under_names_of_the_step() -> None:
    figures = shortage_figures(Shortage(step=4, stream_from=12, refill=3))  # type: ignore[arg-type]
    assert figures == {"stream_from": 12.0, "refill": 3.0}
    assert figures.keys() <= STEP.keys()


def test_pass_at_any_k_has_a_meaning_and_junk_has_none() -> None:
    assert meaning_of("eval_pass_at_16_low") == "Lower end of its 95 % interval."
    assert meaning_of("part_a_reward_kept") == STEP["part_P_kept"].meaning
    assert meaning_of("nonsense") == meaning_of("part_a_nonsense") == ""


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def test_prometheus_endpoint_shows_newest_figures_and_sums(tmp_path: Path) -> None:
    with serve_prometheus("127.0.0.1", 0) as export:
        for _ in range(2):
            export.report(flat(_entry()))
        export.report(flat(_evaluation()))
        samples = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in _scrape(export.port).splitlines()
            if not line.startswith("#")
        }
    assert samples[f"{PREFIX}reward"] == 0.25
    assert samples[f'{PREFIX}part_reward{{part="sums"}}'] == 0.5
    assert samples[f'{PREFIX}eval_part_reward_low{{part="sums"}}'] == 0.4
    assert samples[f"{PREFIX}eval_pass_at_16_high"] == 0.6
    assert samples[f'{PREFIX}dropped_samples_total{{reason="stale"}}'] == 4.0
    assert samples[f"{PREFIX}trained_tokens_total"] == 2.0


def test_a_step_that_trained_on_nothing_is_a_gap_in_prometheus() -> None:
    export = PrometheusExport()
    export.report(flat(_entry()))
    nothing = replace(_figures(), tokens=0, samples=0)
    entry = step_entry(PolicyVersion(6), _taken(), nothing, Durations(2.0, 1.0), make_recipe())
    export.report(flat(entry))
    export.report(flat(_evaluation()))
    shown = {
        name: export.registry.get_sample_value(PREFIX + name) for name in ("entropy", "reward")
    }
    assert math.isnan(shown["entropy"] or 0.0)
    assert shown["reward"] == 0.25


def test_an_evaluation_that_graded_nothing_is_a_gap_in_prometheus() -> None:
    export = PrometheusExport()
    export.report(flat(_entry()))
    export.report(flat(_evaluation()))
    nothing = Evaluation(PolicyVersion(4), None, {}, 0, 9, 16, 4.0, 0.1, None)
    export.report(flat(evaluation_entry(nothing)))
    shown = {
        name: export.registry.get_sample_value(PREFIX + name)
        for name in ("eval_reward", "eval_pass_at_16", "eval_ungraded", "reward")
    }
    assert math.isnan(shown.pop("eval_reward") or 0.0)
    assert math.isnan(shown.pop("eval_pass_at_16") or 0.0)
    assert shown == {"eval_ungraded": 9.0, "reward": 0.25}


def test_every_reason_is_shown_before_anything_was_dropped() -> None:
    (metric,) = [m for m in PrometheusExport().registry.collect() if "dropped" in m.name]
    reasons = {s.labels["reason"] for s in metric.samples if s.name.endswith("_total")}
    assert reasons == {str(drop) for drop in Drop}


def test_port_in_use_is_named() -> None:
    with (
        serve_prometheus("127.0.0.1", 0) as export,
        pytest.raises(ConfigError, match=f"cannot serve metrics on 127.0.0.1:{export.port}"),
        serve_prometheus("127.0.0.1", export.port),
    ):
        pass


def test_wandb_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"), log_to_wandb("p", "n", {}):
        pass


def test_wandb_is_imported_when_asked_for_and_keeps_a_run_offline(tmp_path: Path) -> None:
    # In a process of its own: wandb starts a service and changes the interpreter's exit.
    code = """
    import sys
    from muster.trainer.measure.metrics import log_to_wandb
    assert "wandb" not in sys.modules
    with log_to_wandb("muster", "run-1", {"name": "test"}) as log:
        log({"reward": 0.25})
    """
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.rglob("run-run-1.wandb")
    assert b"reward" in log.read_bytes()
