"""The commands: their flags are frozen, heavy libraries stay out, errors say what to do."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from worlds.client_world import CALIBRATION, RECIPE, TASK_SET

from muster.client import cli
from muster.client.calibration import calibrate, machines_table
from muster.client.cli.judges import juror, validator
from muster.client.cli.keys import wallet
from muster.client.cli.worker import rewards, worker
from muster.inference import calibrate as calibrating
from muster.inference.calibration_plan import MeasuringPlan
from muster.inference.contributions import Contribution, read_file
from muster.inference.loading import require_device
from muster.protocol.errors import ConfigError, EngineError, WalletError
from muster.protocol.ids import to_address
from muster.toploc import Calibration
from muster.toploc.calibration import Measurement
from muster.wallet import LIGHT_SCRYPT_N, create_wallet, load_wallet

COMMANDS: dict[str, Any] = {
    "wallet": wallet,
    "worker": worker,
    "rewards": rewards,
    "validator": validator,
    "juror": juror,
    "calibrate": calibrate,
}


def run(*words: str, **options: Any) -> Any:
    return CliRunner().invoke(COMMANDS[words[0]], list(words[1:]), **options)


def test_commands_are_imported_without_heavy_libraries() -> None:
    names = (each.name for each in iter_modules(cli.__path__, "cli."))
    modules = ", ".join(f"muster.client.{name}" for name in (*names, "doctor.command"))
    program = f"import sys, {modules}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    heavy = {"torch", "transformers", "web3", "pyarrow", "eth_account", "numpy", "httpx"}
    assert heavy.isdisjoint(output.split())


def test_a_worker_rejoins_a_run_and_not_the_bench() -> None:
    assert "bench" not in run("worker", "rejoin", "--help").output
    refused = run("worker", "rejoin", "--run", "0", "--keystore", "worker.json")
    assert (refused.exit_code, "x>=1" in refused.output) == (2, True)


def test_wallet_is_created_and_shown(tmp_path: Path) -> None:
    file = str(tmp_path / "w.json")
    created = run("wallet", "new", file, "--light", env={"MUSTER_PASSWORD": "s"})
    address = to_address(created.stdout.strip())
    assert run("wallet", "show", file).stdout.strip() == address
    wallet = load_wallet(Path(file), "s")
    assert wallet.address == address
    assert wallet.key.hex() not in created.output
    cost = json.loads(Path(file).read_text())["crypto"]["kdfparams"]["n"]
    assert cost == LIGHT_SCRYPT_N


def test_missing_keystore_is_an_error_with_a_hint(tmp_path: Path) -> None:
    result = run("wallet", "show", str(tmp_path / "none"))
    assert isinstance(result.exception, WalletError)
    assert "muster wallet new" in (result.exception.hint or "")


def test_claim_without_a_sender_is_refused_before_anything_is_asked() -> None:
    result = run("rewards", "claim", "--run", "1")
    assert isinstance(result.exception, ConfigError)
    result = run("rewards", "--run", "1")
    assert "no worker is named" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("worker", "run", "--run", "1", "--state-dir", "w"), "orchestrator"),
        (("validator", "run", "--run", "1", "--state-dir", "v"), "orchestrator"),
        (("juror", "run"), "state_dir"),
    ],
)
def test_missing_setting_is_named_before_the_password_is_asked_for(
    words: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    result = run(*words, "--keystore", str(tmp_path / "k"))
    assert isinstance(result.exception, ConfigError)
    assert missing in str(result.exception)


def test_unknown_setting_in_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text('orchestrater = "http://x"\n')
    result = run("worker", "run", "--keystore", "k", "--config", str(tmp_path / "worker.toml"))
    assert "did you mean 'orchestrator'?" in (getattr(result.exception, "hint", "") or "")


ROWS = tuple(
    Measurement(name=name, kind=kind, judged="sample", trials=300, accepted=accepted, strength=0.1)
    for name, kind, accepted in (("batched", "honest", 300), ("weights in int4", "cheap", 2))
)


def measured(
    asked: dict[str, Any], refusal: EngineError | None = None
) -> Callable[..., calibrating.CalibrationRun]:
    def calibrate_model(
        model: Path, plan: MeasuringPlan, **options: Any
    ) -> calibrating.CalibrationRun:
        asked.update(model=model, plan=plan)
        return calibrating.CalibrationRun(CALIBRATION, ROWS, refusal)

    return calibrate_model


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model folder with a configuration only: the file that is read before the model loads."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 32, "max_position_embeddings": 128}')
    return str(folder)


def test_calibration_is_written_and_its_hash_printed(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe").write_bytes(RECIPE.to_bytes())
    (tmp_path / "tasks").write_bytes(TASK_SET.to_bytes())
    asked: dict[str, Any] = {}
    monkeypatch.setattr(calibrating, "calibrate_model", measured(asked))
    out = tmp_path / "calibration.json"
    result = run(
        "calibrate", "--model", model, "--task-set", str(tmp_path / "tasks"),
        "--recipe", str(tmp_path / "recipe"), "--out", str(out), "--samples", "340",
        "--other", f"base={model}", "--threads", "2",
        "--engines", "transformers:float32,vllm:bfloat16",
    )  # fmt: skip
    assert result.stdout.strip() == "0x" + CALIBRATION.hash().hex()
    assert Calibration.from_bytes(out.read_bytes()) == CALIBRATION
    assert (asked["plan"].samples, asked["plan"].recipe) == (340, RECIPE)
    assert (asked["plan"].device, asked["plan"].threads) == ("cpu", 2)
    assert asked["plan"].prompts[0] == TASK_SET[0].prompt
    assert asked["plan"].engines == ("transformers:float32", "vllm:bfloat16")
    assert asked["plan"].others == {"base": Path(model)}
    assert "int4" in result.stderr


def test_calibration_needs_no_more_than_a_model(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(calibrating, "calibrate_model", measured(asked))
    words = ("--engine", "transformers", "--dtype", "bfloat16", "--out", str(tmp_path / "c.json"))
    result = run("calibrate", "--model", model, *words)
    assert result.exit_code == 0
    assert asked["plan"].prompts == []
    assert asked["plan"].engines == ("transformers:bfloat16",)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--samples", "100"], "100 chunks to try forgers on, 300 are needed"),
        (["--engine", "vllm"], "cheats are run on transformers"),
        (["--engines", "abacus"], "no engine 'abacus'"),
        (["--engines", "vllm:float32", "--dtype", "float32"], "--engines says engines"),
        (["--model", "nowhere"], "does not load"),
        (["--out", "no/such/folder/c.json"], "cannot write"),
        (["--recipe", "intellect2-short"], "a context of 128"),
        (["--device", "abacus:7"], "torch cannot compute on 'abacus:7'"),
        (["--contribute"], "a contribution is signed"),
        (["--with", "somebody=part"], "is not ADDRESS=FILE"),
        (["--with", f"0x{'00' * 20}=no/such/file"], "is no contribution"),
    ],
)
def test_calibration_that_cannot_be_is_refused_before_a_model_is_loaded(
    words: list[str], reason: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(calibrating, "calibrate_model", measured(asked))
    result = run("calibrate", "--model", model, *words)
    assert reason in str(result.exception)
    assert not asked


def test_contribution_is_signed_by_its_keystore(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Contribution(
        weights=f"0x{'00' * 32}",
        recipe=f"0x{'00' * 32}",
        device="CPU x86_64",
        engine="transformers:float32",
        work=(),
        pairs=(),
        draws=(),
    )
    monkeypatch.setattr(calibrating, "contribute", lambda *_, **__: said)
    account = create_wallet(tmp_path / "key.json", "secret", light=True)
    (tmp_path / "password").write_text("secret")
    result = run(
        *("calibrate", "--model", model, "--contribute", "--out", str(tmp_path / "part")),
        *("--keystore", str(tmp_path / "key.json")),
        *("--password-file", str(tmp_path / "password")),
    )
    assert result.stdout.strip() == account.address
    assert read_file(tmp_path / "part", account.address).contribution == said


def test_machines_are_shown_side_by_side() -> None:
    (path,) = Path("tests/unit/protocol/documents").glob("calibration.5.*")
    table = machines_table(Calibration.from_bytes(path.read_bytes()).machines)
    shown = io.StringIO()
    Console(width=100, file=shown).print(table)
    assert "by 0xaCD81D4C" in shown.getvalue()
    assert "0.0004883" in shown.getvalue()


def test_refused_model_gets_no_calibration_but_its_table(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = EngineError("the forger 'x' passes")
    monkeypatch.setattr(calibrating, "calibrate_model", measured({}, refusal))
    result = run("calibrate", "--model", model, "--out", str(tmp_path / "c.json"))
    assert result.exception is refusal
    assert "int4" in result.stderr
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("pair", ["base=", "=.", "base=/no/such/folder"])
def test_other_model_is_refused_without_name_or_folder(pair: str) -> None:
    result = run("calibrate", "--model", "m", "--other", pair)
    assert "is not NAME=FOLDER" in str(result.exception)


@pytest.mark.parametrize(
    "words", [("--dtype", "float64"), ("--threads", "0"), ("--threads", "1000")]
)
def test_an_engine_that_there_is_not_is_wrong_usage(words: tuple[str, ...]) -> None:
    result = run("worker", "run", "--keystore", "k", *words)
    assert result.exit_code == 2


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_torch_does_not_have_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"torch cannot compute on '{device}'") as caught:
        require_device(device)
    assert "cpu works everywhere" in (caught.value.hint or "")
    require_device("cpu")


def test_a_gpu_is_found_without_a_context_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made there, which keeps several hundred MB of the GPU until the process ends."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cuda", "cuda:0", "cuda:1"):
        require_device(device)
    assert not torch.cuda.is_initialized()
    with pytest.raises(ConfigError, match="torch cannot compute on 'cuda:2': it finds 2 GPUs"):
        require_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch cannot compute on 'cuda': it finds 0 GPUs"):
        require_device("cuda")
