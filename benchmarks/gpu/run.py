"""All measurements on one GPU, unattended, in less than 40 minutes.

    make test-gpu                           the parts that answer yes or no
    make bench-gpu                          all parts
    make bench-gpu ARGS="noise replay"      some
    make test-gpu DEVICE=cpu                the same code on tiny shapes, without a GPU

Each part is a separate process with a time limit. A part that fails, takes too long or lacks
something does not stop the others. Its output is in runs/gpu/PART.log; its figures go into
results/gpu-PART.json, those of a CPU into runs/gpu. The last thing printed is a table of all parts.
Ends with 0 if no part failed and no figure missed its bound, with 2 where there is no GPU.
"""

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarks import report
from benchmarks.gpu.setup import Figures, Missing, Setup

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "gpu"
NO_GPU = 2
"""Exit code where there is no GPU."""
SHOWN = 100
"""Characters of a reason in the table."""


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement on a GPU."""

    measured_by: str
    """Module and function that measure it."""
    limit_s: float
    """Seconds it may take."""
    is_check: bool = True
    """Whether it answers yes or no, and so belongs to `make test-gpu`."""
    most: Mapping[str, float] = field(default_factory=dict)
    """Largest values of metrics, on every device."""
    most_on_gpu: Mapping[str, float] = field(default_factory=dict)
    """Largest values of metrics on a GPU, with users' shapes."""

    def missed(self, metrics: Mapping[str, float], setup: Setup) -> list[str]:
        """Return the bounds that a part's metrics miss; NaN misses every bound."""
        bounds = {**self.most, **({} if setup.is_tiny else self.most_on_gpu)}
        return [
            f"{name} {metrics[name]:.4g} > {most:g}"
            for name, most in bounds.items()
            if not metrics[name] <= most
        ]


HERE = "benchmarks.gpu"
PARTS: dict[str, Part] = {
    "noise": Part(f"{HERE}.choices:measure_noise", 120, most={"gpu_noise_wrong_ids": 0}),
    "toploc": Part(f"{HERE}.choices:measure_toploc", 60, most={"gpu_toploc_differing": 0}),
    "replay": Part(
        f"{HERE}.choices:measure_replay",
        60,
        most={"gpu_replay_wrong_ids": 0, "gpu_replay_margin_error": 1e-4},
    ),
    "conformance": Part(
        f"{HERE}.engines:measure_conformance", 240, most={"gpu_conformance_failed": 0}
    ),
    "vllm": Part(f"{HERE}.engines:measure_vllm", 420, most={"gpu_vllm_failed": 0}),
    "margins": Part(
        f"{HERE}.engines:measure_margins", 180, most={"gpu_margins_rejected_float32": 0}
    ),
    "generation": Part(
        f"{HERE}.engines:measure_generation",
        120,
        is_check=False,
        most_on_gpu={"gpu_generation_overhead": 0.03},
    ),
    "vllm-speed": Part(
        f"{HERE}.engines:measure_vllm_speed",
        300,
        is_check=False,
        most_on_gpu={"gpu_vllm_overhead": 0.03},
    ),
    "examination": Part(
        f"{HERE}.engines:measure_examination",
        120,
        is_check=False,
        most={"gpu_examine_wrong_share": 0.02},
        most_on_gpu={"gpu_examine_over_generate": 1 / 50},
    ),
    "trainer": Part(f"{HERE}.training:measure_trainer", 180, is_check=False),
    "host": Part(f"{HERE}.training:measure_host", 120, most={"gpu_host_difference": 0.01}),
    "nccl": Part(f"{HERE}.training:measure_one_rank", 60, most={"gpu_one_rank_difference": 0.01}),
    "resume": Part(f"{HERE}.training:measure_resume", 60, most={"gpu_resume_difference": 0.01}),
    "sites": Part(f"{HERE}.training:measure_sites", 60, most={"gpu_sites_difference": 0}),
    "doctor": Part(f"{HERE}.network:measure_doctor", 120, most={"gpu_doctor_failed": 0}),
    "network": Part(f"{HERE}.network:measure_network", 180, most={"gpu_network_rejected": 0}),
}
"""In the order in which they are measured: cheap ones first."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a part."""

    state: str
    """ok, missed, failed or not run."""
    seconds: float
    """How long it took."""
    why: str = ""
    """What was missed, or why it failed or could not run."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Its figures."""

    @property
    def is_bad(self) -> bool:
        """Whether it failed or missed a bound."""
        return self.state in ("missed", "failed")


# ------------------------------------------------------------------------------ one part, alone


def measure(part: str, setup: Setup) -> Figures:
    """Return a part's figures, measured in this process."""
    module, _, name = PARTS[part].measured_by.partition(":")
    measured: Callable[[Setup], Figures] = getattr(importlib.import_module(module), name)
    return measured(setup)


def measure_alone(part: str, setup: Setup) -> int:
    """Measure a part in this process, and print the outcome as the last line."""
    try:
        metrics, detail = measure(part, setup)
    except Missing as missing:
        print(json.dumps({"missing": str(missing)}))
        return 0
    except Exception as error:  # Any exception is the part's outcome.
        traceback.print_exc()
        print(json.dumps({"failure": f"{type(error).__name__}: {error}"}))
        return 1
    print(json.dumps({"metrics": metrics, "detail": detail}))
    return 0


# ------------------------------------------------------------------------------------ all parts


def run_part(part: str, setup: Setup, results: Path) -> Outcome:
    """Measure a part in a process of its own, and write its figures."""
    began = time.monotonic()
    said, why = _ask(part, setup, PARTS[part].limit_s)
    seconds = time.monotonic() - began
    if "missing" in said:
        return Outcome("not run", seconds, said["missing"])
    if "metrics" not in said:
        return Outcome("failed", seconds, said.get("failure", why))
    metrics, detail = said["metrics"], said["detail"]
    missed = PARTS[part].missed(metrics, setup)
    detail = {**detail, "seconds": seconds, "missed": missed, "torch": torch.__version__}
    report.write(
        f"gpu-{part}",
        metrics,
        detail,
        measured_on=f"{report.machine()}, {device_name(setup.device)}",
        commit=_commit(),
        folder=results,
    )
    return Outcome("missed" if missed else "ok", seconds, "; ".join(missed), metrics)


def _ask(part: str, setup: Setup, limit_s: float) -> tuple[dict[str, Any], str]:
    """Return the answer of a part's process and, if there is none, how the process ended."""
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / f"{part}.log"
    command = [sys.executable, "-m", f"{HERE}.run", "--alone", part, "--device", setup.device]
    command += ["--models", str(setup.models), *(["--tiny"] if setup.is_tiny else [])]
    with (
        path.open("w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {}, f"took longer than {limit_s:g} s, see {path}"
    try:
        said: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        said = {}
    return said, f"ended with {process.returncode}, see {path}"


def _commit() -> str | None:
    try:
        return report.present_commit()
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: str) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def why_no_gpu(device: str) -> str | None:
    """Return why torch cannot compute on a device; None if it can."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return (
            f"No GPU: torch {torch.__version__} cannot compute on {device!r} "
            f"({str(error).splitlines()[0]}); docs/engines.md says how to install one that can, "
            "and DEVICE=cpu runs the same parts on tiny shapes."
        )
    return None


def show(outcomes: Mapping[str, Outcome]) -> None:
    """Print the table of all parts."""
    rows = [
        [
            part,
            found.state,
            f"{found.seconds:.0f}",
            (found.why or ", ".join(f"{k} {v:.4g}" for k, v in found.metrics.items()))[:SHOWN],
        ]
        for part, found in outcomes.items()
    ]
    report.print_table("One GPU", ["part", "state", "s", "figures, or why not"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure parts, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--checks", action="store_true", help="run only checks, which pass or fail")
    parser.add_argument("--device", default="cuda", help="device, as torch names it")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--results", type=Path, help="folder of the figures' files")
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    is_tiny = args.tiny or args.device == "cpu"
    if args.alone:
        return measure_alone(args.alone, Setup(args.device, is_tiny, args.models))
    if reason := why_no_gpu(args.device):
        print(reason, file=sys.stderr)
        return NO_GPU
    chosen = args.parts or [name for name, p in PARTS.items() if p.is_check or not args.checks]
    results = args.results or (RUNS if is_tiny else report.RESULTS)
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as models:
        for part in chosen:
            print(f"\n{part} ...", flush=True)
            outcomes[part] = run_part(part, Setup(args.device, is_tiny, Path(models)), results)
    show(outcomes)
    return int(any(found.is_bad for found in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
