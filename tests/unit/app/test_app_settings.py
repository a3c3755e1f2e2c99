"""Settings of all processes that hold lists: variables and flags give several values."""

import pytest

from muster.app.run_file import RunFile
from muster.client.relay import RelaySettings
from muster.client.settings import JurorSettings, ValidatorSettings
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.errors import ConfigError
from muster.settings import Settings, load_settings

ONE, OTHER = "http://a:1", "https://b.example"
NODE = {"run": 1, "state_dir": "s", "orchestrator": "http://o"}
OWNER = {
    **{"keystore": "k", "orchestrator": "0x1", "validators": ("0x1",), "quorum": 1, "model": "m"},
    **{"recipe": "demo", "task_set": "t", "calibration": "c", "price": 1, "store": "s"},
    "documents": "d",
}
LISTS: list[tuple[type[Settings], str, dict[str, object]]] = [
    (RelaySettings, "upstream", {"run": 1}),
    (OrchestratorSettings, "relays", {"run": 1, "keystore": "k"}),
    (OrchestratorSettings, "public_rpc", {"run": 1, "keystore": "k"}),
    (ValidatorSettings, "relay", NODE),
    (JurorSettings, "source", {"state_dir": "s"}),
    (JurorSettings, "relay", {"state_dir": "s"}),
]


def load(kind: type[Settings], given: dict[str, object], **environ: str) -> Settings:
    chain = {"rpc": "http://c", "deployments": "d"}
    return load_settings(kind, env_prefix="X_", flags={**chain, **given}, environ=environ)


@pytest.mark.parametrize(("kind", "name", "given"), LISTS)
def test_urls_come_from_one_text_or_several(
    kind: type[Settings], name: str, given: dict[str, object]
) -> None:
    variable = f"X_{name.upper()}"
    assert getattr(load(kind, given, **{variable: f"{ONE},{OTHER}"}), name) == (ONE, OTHER)
    assert getattr(load(kind, given, **{variable: f"{ONE} {OTHER}"}), name) == (ONE, OTHER)
    assert getattr(load(kind, given, **{variable: ""}), name) == ()
    for flags in ((ONE, OTHER), (f"{ONE},{OTHER}",)):
        assert getattr(load(kind, {**given, name: flags}), name) == (ONE, OTHER)


@pytest.mark.parametrize(("kind", "name", "given"), LISTS)
@pytest.mark.parametrize("text", ["a:1", "host", "ftp://a", "http://", "http://[", "/run/x.ipc"])
def test_what_is_no_url_is_named(
    kind: type[Settings], name: str, given: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"setting '{name}"):
        load(kind, {**given, name: (ONE, text)})


def test_accounts_and_engines_come_from_variables() -> None:
    first, second = "0x" + "11" * 20, "0x" + "22" * 20
    found = load(
        OrchestratorSettings, {"run": 1, "keystore": "k"}, X_EVALUATORS=f"{first},{second}"
    )
    assert isinstance(found, OrchestratorSettings)
    assert found.evaluators == (first, second)
    owner = {name: value for name, value in OWNER.items() if name != "validators"}
    run = load(
        RunFile, owner, X_VALIDATORS=f"{first} {second}", X_ENGINES="vllm:bfloat16,transformers:a"
    )
    assert isinstance(run, RunFile)
    assert run.validators == (first, second)
    assert run.engines == ("vllm:bfloat16", "transformers:a")
