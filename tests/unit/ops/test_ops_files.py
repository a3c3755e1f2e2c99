"""Units and containers: every command line exists, nothing runs with more than it needs."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]

from muster.app.cli import muster
from muster.client.relay import RelaySettings
from muster.client.settings import JurorSettings, ValidatorSettings, WorkerSettings
from muster.lifecycle import SPARE_FILES
from muster.orchestrator.settings import OrchestratorSettings
from muster.settings import Settings, load_settings
from muster.shardcast.connections import FILES_EACH, ServerLimits
from muster.trainer.config import TrainerSettings
from muster.trainer.create import IMAGE_PYTHON, pythons_beside_image

ROOT = Path(__file__).parents[3]
UNITS = sorted((ROOT / "ops" / "systemd").glob("*.service"))
CONTAINERFILE = ROOT / "ops" / "container" / "Containerfile"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "ops" / "container" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
GUIDE = (ROOT / "docs" / "guides" / "services.md").read_text()
PROCESSES = {"worker", "validator", "juror", "relay", "orchestrator", "trainer"}
GRADERS = ["juror", "trainer", "validator", "worker"]


def require_known(words: list[str]) -> None:
    """Fail unless a command line names a command of ours and flags that it has."""
    command: click.Command = muster
    context = click.Context(muster)
    while isinstance(command, click.Group):
        found = command.get_command(context, words.pop(0))
        assert found is not None, words
        command = found
    known = {option for p in command.get_params(context) for option in p.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_owner_is_told_of_a_python_that_the_image_has_not() -> None:
    assert set(re.findall(r"^FROM python:(\d+\.\d+)-", CONTAINERFILE.read_text(), re.M)) == {
        IMAGE_PYTHON
    }
    pinned = [f"2 (CPython {IMAGE_PYTHON})", "2", "2 (CPython 3.99, programs: python 3.98)"]
    assert [pythons_beside_image([each]) for each in pinned] == [[], [], ["3.98", "3.99"]]


# systemd


def entries(unit: Path) -> dict[str, list[str]]:
    """Return a unit's settings; a name may come several times."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith(("#", ";")):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def test_every_process_has_a_unit() -> None:
    assert {unit.stem.removeprefix("muster-") for unit in UNITS} == PROCESSES


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    (start,) = entries(unit)["ExecStart"]
    path, *words = shlex.split(start)
    assert path == "/opt/muster/bin/muster"
    require_known(words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_comes_back_but_for_what_people_must_mend(unit: Path) -> None:
    found = entries(unit)
    assert found["Restart"] == ["on-failure"]
    assert found["RestartPreventExitStatus"] == ["1 2"]
    assert int(found["RestartSec"][0]) >= 5
    assert "`RestartPreventExitStatus=1 2`" in (ROOT / "docs/reference/exit-codes.md").read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("UMask", "0077"),
        ("StateDirectoryMode", "0700"),
        ("SystemCallArchitectures", "native"),
    ],
)
def test_a_unit_may_do_no_more_than_it_must(unit: Path, name: str, value: str) -> None:
    assert entries(unit)[name] == [value]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_has_a_home_for_what_is_cached(unit: Path) -> None:
    found, name = entries(unit), unit.stem.removeprefix("muster-")
    assert found["CacheDirectory"] == [f"muster/{name}"]
    assert f"HOME=%C/muster/{name}" in found["Environment"][0].split()


def test_orchestrator_has_the_folder_of_the_socket_that_the_guide_names() -> None:
    found = entries(ROOT / "ops" / "systemd" / "muster-orchestrator.service")
    assert found["RuntimeDirectory"] == ["muster"]
    assert "--admin-socket /run/muster/" in GUIDE


@pytest.mark.parametrize("name", ["relay", "orchestrator"])
def test_what_faces_the_network_makes_no_namespaces_and_no_code(name: str) -> None:
    found = entries(ROOT / "ops" / "systemd" / f"muster-{name}.service")
    assert found["RestrictNamespaces"] == found["MemoryDenyWriteExecute"] == ["yes"]
    assert "@system-service" in found["SystemCallFilter"]
    assert found["ProtectHostname"] == found["ProtectKernelTunables"] == ["yes"]


@pytest.mark.parametrize("name", ["relay", "orchestrator", "trainer"])
def test_what_strangers_connect_to_has_files_for_all_connections(name: str) -> None:
    found = entries(ROOT / "ops" / "systemd" / f"muster-{name}.service")
    accepted = OrchestratorSettings.model_fields["max_connections"].default
    most = max(FILES_EACH * ServerLimits().connections, accepted)
    assert int(found["LimitNOFILE"][0]) >= most + SPARE_FILES


@pytest.mark.parametrize("name", GRADERS)
def test_what_grades_programs_may_start_the_sandbox(name: str) -> None:
    # test_tasks_sandbox.py plays what these settings do to the sandbox.
    found = entries(ROOT / "ops" / "systemd" / f"muster-{name}.service")
    hindering = {"ProtectHostname", "ProtectKernelTunables", "RestrictNamespaces"}
    hindering |= {"SystemCallFilter", "MemoryDenyWriteExecute", "ProcSubset"}
    assert not hindering & found.keys()


SETTINGS: dict[str, type[Settings]] = {
    "worker": WorkerSettings,
    "validator": ValidatorSettings,
    "juror": JurorSettings,
    "relay": RelaySettings,
    "orchestrator": OrchestratorSettings,
    "trainer": TrainerSettings,
}


@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_example_is_all_that_a_unit_does_not_set(name: str) -> None:
    (start,) = entries(ROOT / "ops" / "systemd" / f"muster-{name}.service")["ExecStart"]
    words = shlex.split(start)
    flags = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in pairwise(words)
        if flag.startswith("--") and flag != "--config"
    }
    kind = SETTINGS[name]
    flags = {key: value for key, value in flags.items() if key in kind.model_fields}
    file = ROOT / "ops" / "systemd" / "settings" / f"{name}.toml"
    assert words[words.index("--config") + 1] == f"/etc/muster/{file.name}"
    load_settings(kind, env_prefix="MUSTER_", file=file, flags=flags, environ={})


def installed() -> dict[str, int]:
    """Return the mode of every file and folder that the guide's commands install."""
    modes: dict[str, int] = {}
    for is_folder, mode, rest in re.findall(r"^# install (-d )?-m (0\d+) (.*)", GUIDE, re.M):
        *files, place = shlex.split(rest)
        paths = [*files, place] if is_folder else [place + Path(file).name for file in files]
        modes |= dict.fromkeys(paths, int(mode, 8))
    return modes


def test_guide_installs_what_a_process_reads_itself_for_every_user() -> None:
    # A process has no rights; systemd itself reads its credentials and environment.
    modes, unit = installed(), entries(ROOT / "ops" / "systemd" / "muster-worker.service")
    credentials = [value.split(":")[1] for value in unit["LoadCredential"]]
    secrets = [*credentials, unit["EnvironmentFile"][0].removeprefix("-")]
    settings = re.findall(r"/etc/muster/\w+\.toml", unit["ExecStart"][0])
    assert {modes.pop(path) for path in secrets} == {0o600}
    assert {modes[path] for path in settings} == {0o644}
    assert all(mode & 0o004 for mode in modes.values())
    assert modes["/etc/muster"] == modes["/etc/muster/deployments"] == 0o755


def test_guide_lists_modes_of_secrets_and_of_what_a_process_reads_itself() -> None:
    table = re.findall(r"^\| (`.*?) \| .* \| (0\d+)", GUIDE, re.M)
    modes = {name: mode for names, mode in table for name in re.findall(r"`([\w.]+)`", names)}
    keystores = {f"{name}.json": "0600" for name in ("node", *(PROCESSES - {"worker", "relay"}))}
    others = {"worker.toml": "0644", "deployments": "0755", "documents": "0755"}
    assert modes == keystores | others | {"environment": "0600", "worker.password": "0600"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_no_unit_holds_the_cold_key_or_a_secret(unit: Path) -> None:
    text = unit.read_text()
    assert "/worker.json" not in text
    assert "MUSTER_PASSWORD" not in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_a_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/muster/bin/muster", shutil.which("true") or ""))
    words = ["systemd-analyze", "verify", "--man=no", str(copy)]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# Containers


def instructions() -> list[tuple[str, str]]:
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines if line[0] != "#"]


def test_the_image_is_built_of_files_that_exist() -> None:
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            assert [s for s in sources if not (ROOT / s).exists()] == []


def test_the_image_is_built_of_all_that_the_wheel_holds() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = wheel["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = [rest.split()[0] for word, rest in instructions() if word == "COPY"]
    data = runpy.run_path(str(ROOT / "tools" / "build_kernel.py"))["DATA"]
    for source in (*wheel["packages"], *data, *wheel["shared-data"]):
        assert any(Path(source).is_relative_to(folder) for folder in copied)


def test_the_image_runs_as_nobody_in_particular_and_takes_signals_itself() -> None:
    found = dict(instructions())
    assert found["USER"] == "10001"
    assert json.loads(found["ENTRYPOINT"]) == ["muster"]
    assert found["STOPSIGNAL"] == "SIGTERM"


def test_the_image_rests_on_pinned_bases_without_leftovers() -> None:
    words = [word for word, _ in instructions()]
    assert "ADD" not in words
    for word, rest in instructions():
        if word == "FROM":
            assert re.match(r"[a-z]+:[0-9.]+-[a-z-]+( AS [a-z]+)?$", rest), rest
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest


def test_every_process_has_a_container() -> None:
    assert set(SERVICES) == PROCESSES
    assert all(service["profiles"] == [name] for name, service in SERVICES.items())


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_container_starts_a_command_that_exists(name: str) -> None:
    require_known([str(word) for word in SERVICES[name]["command"]])


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_container_may_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "on-failure"
    assert "privileged" not in service


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_secrets_and_volumes_of_a_container_are_defined(name: str) -> None:
    service = SERVICES[name]
    secrets = {secret["source"] for secret in service.get("secrets", [])}
    assert secrets <= set(COMPOSE["secrets"])
    short = [v for v in service["volumes"] if isinstance(v, str)]
    named = {v.split(":")[0] for v in short if not v.startswith("$")}
    assert named == {name} <= set(COMPOSE["volumes"])


def test_what_listens_has_a_health_check_on_its_port() -> None:
    for service in SERVICES.values():
        for port in service.get("ports", []):
            outside, inside = port.split(":")
            assert f":{inside}/healthz" in service["healthcheck"]["test"][-1]
            assert outside in map(str, service["command"])


def test_no_service_is_asked_for_a_setting_of_another() -> None:
    # Compose replaces the variables of all services, also of those that are not started.
    required = [set(re.findall(r"\$\{(\w+):?\?", str(service))) for service in SERVICES.values()]
    assert all(each == {"MUSTER_RPC", "MUSTER_DEPLOYMENT_FILES"} for each in required)


def test_every_variable_of_the_compose_file_is_in_the_guide() -> None:
    text = (ROOT / "ops" / "container" / "compose.yaml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used <= set(re.findall(r"`(MUSTER_\w+)`", GUIDE))


def test_no_secret_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "ops/container/secrets" in ignored
    assert "/ops/container/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
