"""The notebook's cells run one after the other, on a chain with a contribution and a slash."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from chain_scenario import CHEATER, HONEST, ORCHESTRATOR, Scenario, network, play

from muster.chain import save_deployment

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "contributions.ipynb"


async def run_cells(notebook: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return what the cells define, and the value that each code cell shows last."""
    names: dict[str, Any] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body[-1]
            if isinstance(last, ast.Expr):
                tree.body[-1] = ast.Assign([ast.Name("_shown", ast.Store())], last.value)
            code = compile(
                ast.fix_missing_locations(tree),
                str(NOTEBOOK),
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            )
            names.pop("_shown", None)
            result = eval(code, names)
            if inspect.iscoroutine(result):
                await result
            shown.append(names.get("_shown"))
    return names, shown


async def played(net: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await play(net)
    save_deployment(tmp_path, net.deployment)
    monkeypatch.setenv("MUSTER_RPC", net.anvil.rpc_url)
    monkeypatch.setenv("MUSTER_DEPLOYMENTS", str(tmp_path))


async def test_contributions_and_slashes_are_those_of_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with network() as net:
        await played(net, tmp_path, monkeypatch)
        names, shown = await run_cells(json.loads(NOTEBOOK.read_text()))
        batches = await net.of(ORCHESTRATOR).ledger.batch_count()
    table, slashes = shown[2], shown[3]
    assert table.loc[(1, HONEST.address), "accepted"] == 2300
    assert table.loc[(1, CHEATER.address), "fraud"] > 0
    assert list(slashes["owner"]) == [CHEATER.address]
    assert list(slashes["tokens"]) == [25.0]
    assert [event.args.owner for event in names["events"]] == [CHEATER.address]
    assert shown[1] == f"chain 31337, block {names['block'].number}, {batches} batches"


def test_the_notebook_holds_no_output() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
