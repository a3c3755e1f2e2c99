"""A third party's package, installed as anyone would install it, without a change of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.tasks.verifier import python_here

EXAMPLE = Path(__file__).parents[3] / "examples" / "countdown-task"
GRADE = """
import sys
from pathlib import Path
from muster.tasks import TaskSet, check_task_set, identities, require_pinned, verify

tasks = TaskSet.from_bytes(Path(sys.argv[1]).read_bytes())
check_task_set(tasks)
(identity,) = identities(problem.task_type for problem in tasks)
require_pinned([identity])
print(identity.name, identity.version, len(tasks))
first = tasks[0].model_copy(update={"verification_info": {"numbers": [3, 7, 8], "target": 29}})
for answer in sys.argv[2:]:
    print(verify(first, answer).score)
"""
RIGHT = ["7*3+8", "8+(3 * 7)", "let me think\n(7*3)+8"]
WRONG = [
    "29",
    "7*3",
    "7*3+8+0",
    "7*3+8=29",
    "7*3+8)",
    "((7*3+8",
    "7*3/(8-8)",
    "7**3-8",
    "",
    "٧*3+8",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example package into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    local = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *local, str(EXAMPLE)], check=True, timeout=120, env=_environment())
    return target


def run(installed: Path, *arguments: str) -> list[str]:
    environment = _environment() | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, check=True, timeout=60, env=environment, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "ignore"}


def test_installed_package_brings_task_type_verifier_and_task_set(
    installed: Path, tmp_path: Path
) -> None:
    tasks = str(tmp_path / "tasks.jsonl")
    muster = ("-m", "muster.app", "tasks")
    (listed,) = run(installed, *muster, "list", "--json")
    found = {made["set"]: made for made in json.loads(listed)["sets"]}
    assert (found["countdown"]["package"], found["countdown"]["version"]) == (
        "muster-countdown",
        "1.0.0",
    )
    size = ("--count", "40", "--seed", "1")
    run(installed, *muster, "import", "set:countdown", *size, "--out", tasks)
    (checked,) = run(installed, *muster, "check", tasks, "--sample", "4", "--json")
    assert json.loads(checked)["admitted"]
    said, *scores = run(installed, "-c", GRADE, tasks, *RIGHT, *WRONG)
    assert said == f"countdown 1 ({python_here()}) 40"
    assert scores == ["1.0"] * len(RIGHT) + ["0.0"] * len(WRONG)
