"""What solc is given: the contracts' sources and settings, as explorers ask for them.

Needs a checkout with `node_modules`; the artifacts are made of the same document.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from muster.protocol.errors import ConfigError

COMPILER = "v0.8.30+commit.73712a01"
"""What explorers call the compiler that npm's `solc` is."""
ROOT = Path(__file__).parents[4]
"""Of a checkout; in an installed wheel there are no sources below it."""
OUTPUTS = ["abi", "evm.bytecode.object", "evm.deployedBytecode"]
_IMPORT = re.compile(r'^import\s[^;]*?"([^"]+)";', re.M)


def standard_json(contracts: Iterable[str], root: Path = ROOT) -> dict[str, Any]:
    """Return solc's standard JSON input of contracts and of all that they import.

    Raises ConfigError outside a checkout.
    """
    settings = _settings(root)
    sources: dict[str, str] = {}
    waiting = [f"contracts/src/{name}.sol" for name in contracts]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = _read(root, name)
            waiting += _imports(name, sources[name], settings["remappings"])
    return {
        "language": "Solidity",
        "sources": {name: {"content": sources[name]} for name in sorted(sources)},
        "settings": {**settings, "outputSelection": {"*": {"*": OUTPUTS}}},
    }


def write_standard_json(folder: Path, contracts: Iterable[str], root: Path = ROOT) -> list[Path]:
    """Write one input per contract, with its sources only, and return the files."""
    documents = {name: standard_json([name], root) for name in contracts}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, document in documents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        paths.append(path)
    return paths


def _settings(root: Path) -> dict[str, Any]:
    forge = tomllib.loads(_read(root, "foundry.toml"))["profile"]["default"]
    return {
        "remappings": forge["remappings"],
        "optimizer": {"enabled": forge["optimizer"], "runs": forge["optimizer_runs"]},
        "metadata": {"bytecodeHash": forge["bytecode_hash"], "appendCBOR": forge["cbor_metadata"]},
        "evmVersion": forge["evm_version"],
        "viaIR": False,
    }


def _imports(name: str, text: str, remappings: Iterable[str]) -> Iterator[str]:
    prefixes: Mapping[str, str] = dict(line.split("=") for line in remappings)
    for path in _IMPORT.findall(text):
        if path.startswith("."):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        else:
            prefix = next(p for p in prefixes if path.startswith(p))
            yield prefixes[prefix] + path.removeprefix(prefix)


def _read(root: Path, name: str) -> str:
    try:
        return (root / name).read_text()
    except OSError as error:
        raise ConfigError(
            f"the contracts' sources are not here: there is no {root / name}",
            hint="a wheel has bytecode only: run this in a checkout after make setup",
        ) from error
