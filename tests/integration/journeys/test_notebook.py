"""The notebooks' cells run in order: one audits a played chain, one trains on a network."""

import ast
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from chain_scenario import CHEATER, HONEST, ORCHESTRATOR, PRICE, Scenario, network, play

from muster.chain import save_deployment

NOTEBOOKS = Path(__file__).parents[3] / "examples" / "notebooks"


async def run_cells(name: str, names: dict[str, Any]) -> list[Any]:
    """Return the value that each code cell shows last; what the cells define goes into `names`."""
    shown = []
    for cell in json.loads((NOTEBOOKS / name).read_text())["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body[-1]
            if isinstance(last, ast.Expr):
                tree.body[-1] = ast.Assign([ast.Name("_shown", ast.Store())], last.value)
            code = compile(
                ast.fix_missing_locations(tree), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            names.pop("_shown", None)
            result = eval(code, names)
            if inspect.iscoroutine(result):
                await result
            shown.append(names.get("_shown"))
    return shown


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
        names: dict[str, Any] = {}
        shown = await run_cells("contributions.ipynb", names)
        batches = await net.of(ORCHESTRATOR).ledger.batch_count()
    table, money, roots, contradictions, slashes = shown[2:7]
    assert table.loc[(1, HONEST.address), "accepted"] == 2300
    assert table.loc[(1, CHEATER.address), "fraud"] > 0
    assert list(money.index) == [(1, HONEST.address)]
    paid, due = money.loc[(1, HONEST.address), ["paid", "due"]]
    assert (paid, due) == pytest.approx((1300 * PRICE / 10**18, 1000 * PRICE / 10**18))
    assert list(roots["root is right"]) == [True, True]
    assert list(roots["outcomes"]) == [3, 1]
    assert contradictions == []
    assert list(slashes["owner"]) == [CHEATER.address]
    assert list(slashes["tokens"]) == [25.0]
    assert [event.args.owner for event in names["events"]] == [CHEATER.address]
    assert shown[1] == f"chain 31337, block {names['block'].number}, {batches} batches"


async def test_model_folder_learns_its_tasks() -> None:
    names: dict[str, Any] = {}
    try:
        shown = await run_cells("training.ipynb", names)
    finally:
        if "stack" in names:
            await names["stack"].aclose()
        shutil.rmtree(names["folder"])
    status, evaluations = shown[-3:-1]
    assert status == 0
    assert list(evaluations["policy_version"]) == [0, 5, 10]
    first, *_, last = evaluations["reward"]
    assert last > first + 0.2


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_holds_no_output(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
