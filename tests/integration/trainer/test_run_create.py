"""`muster run create`: every part is checked before anything is sent; then one question."""

import json
import re
import shlex
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_scenario import CHALLENGER, ORCHESTRATOR, OWNER, TOKEN, TRAINER, VALIDATORS
from journey_stage import Stage, hint, open_stage, undone
from one_submission import judge, ticket
from trainer_network import CALIBRATION
from worlds.chat_world import build_chat_model, make_word_tokenizer
from worlds.traces import ALL, Traces

from muster.chain import Chain
from muster.client.dataset.export import export_rows
from muster.client.dataset.selection import HeldOut, Selection
from muster.client.validator.judging import Rules
from muster.client.worker.generation import play_ticket
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import ChainError, MusterError
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import state_hash
from muster.tasks import TaskSet
from muster.trainer.base_model import LESSONS, WarmStart, build_base_model
from muster.trainer.config import load_recipe
from muster.trainer.create import create_and_fund
from muster.trainer.publish.policies import policy_files

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Desk:
    """An owner's folder, and the network it creates runs on."""

    stage: Stage
    folder: Path

    def file(self, **changes: Any) -> str:
        """Write RUN.toml and return its path; a value that is None is left out."""
        values = {
            "keystore": self.stage.key("owner"),
            "trainer_keystore": self.stage.key("trainer"),
            "orchestrator": ORCHESTRATOR.address,
            "validators": [v.address for v in VALIDATORS],
            "quorum": 2,
            "model": str(self.folder / "model"),
            "recipe": str(ROOT / "configs" / "demo.toml"),
            "task_set": str(self.folder / "tasks.jsonl"),
            "calibration": str(self.folder / "calibration.json"),
            "price": "0.000001 tokens",
            "fraud_ppm": 500_000,
            "fund": "2 tokens",
            "store": str(self.folder / "store"),
            "documents": str(self.folder / "documents"),
            "sample": 4,
            **changes,
        }
        lines = [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None]
        path = self.folder / "run.toml"
        path.write_text("\n".join(lines))
        return str(path)

    async def refusal(self, *flags: str, **changes: Any) -> MusterError:
        """Return the reason why a run is not created; nothing was written or sent."""
        error = await self.stage.error("run", "create", self.file(**changes), "--yes", *flags)
        assert isinstance(error, MusterError), error
        assert not (self.folder / "documents").exists()
        assert await self.runs() == 1
        return error

    async def runs(self) -> int:
        return await self.stage.scenario.of(OWNER).runs.run_count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Desk]:
    folder = tmp_path_factory.mktemp("create")
    build_base_model(folder / "model", seed=0, warm_start=WarmStart(steps=20, batch=32))
    tasks, _ = LESSONS["sort"].split(64, 1, 0)
    (folder / "tasks.jsonl").write_bytes(tasks.to_bytes())
    (folder / "calibration.json").write_bytes(CALIBRATION.to_bytes())
    async with open_stage(tmp_path_factory.mktemp("stage")) as stage:
        stage.keep("owner", OWNER)
        stage.keep("trainer", TRAINER)
        await stage.scenario.of(OWNER).token.faucet(OWNER.address, 5 * TOKEN)
        yield Desk(stage, folder)


@pytest_asyncio.fixture(loop_scope="module")
async def desk(opened: Desk) -> AsyncIterator[Desk]:
    async with undone(opened.stage) as fresh:
        yield Desk(fresh, opened.folder)
    for name in ("documents", "store", "broken", "chat"):
        shutil.rmtree(opened.folder / name, ignore_errors=True)


async def test_a_run_is_created_from_one_file(desk: Desk) -> None:
    result = await desk.stage.run("run", "create", desk.file(), "--json", run_input="y\n")
    assert result.exception is None, result.output
    created = json.loads(result.stdout.splitlines()[-1])
    assert created["run_id"] == 2
    asked = result.stderr
    assert "right on 4 problems, 4 times each" in asked
    assert "locked      2 tokens, for 2,000,000 units" in asked
    assert "jurors      4 of the network's bench could judge a dispute" in asked
    assert asked.count("Create the run?") == 1
    assert max(map(len, asked.split("Create the run?")[0].splitlines()[-20:])) <= 80
    runs = desk.stage.scenario.of(OWNER).runs
    assert (await runs.config_of(RunId(2))).trainer == TRAINER.address
    assert any((await runs.checkpoint_of(RunId(2), PolicyVersion(0))).manifest_root)
    shown = await desk.stage.json("run", "show", "2", "--documents", str(desk.folder / "documents"))
    assert (shown["state"], shown["steps"]) == ("open", 28)
    assert shown["funds"]["available_wei"] == str(2 * TOKEN)


async def test_a_run_begins_with_a_model_that_was_fine_tuned_on_a_data_set(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = Traces(tmp_path)
    traces.add_counting(20)
    folder = traces.data_folder()
    selection = Selection(ALL, HeldOut())
    await export_rows(folder, traces.stream, traces.maker, selection, traces.find_file)
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(desk.folder / "model", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "guides" / "sft.md").read_text()
    for name, text in re.findall(r"^```toml\n# (\S+)\n(.*?)^```", guide, re.M | re.S):
        (tmp_path / name).write_text(text)
    lines = re.findall(r"^```sh\nmuster (.*?)\n```", guide, re.M | re.S)
    said = [await desk.stage.run(*shlex.split(line), chain=False) for line in lines]
    assert [result.exception for result in said] == [None, None]
    assert said[0].stdout == "student\n"
    made_of = "fine-tuned in 4 steps on 120 rows of data set "
    assert said[1].stdout.startswith(made_of)
    assert said[1].stdout.count("\nok ") == 4
    result = await desk.stage.run(
        "run", "create", desk.file(model=str(tmp_path / "student"), sample=0), "--yes", "--json"
    )
    assert result.exception is None, result.output
    assert f"lineage     {made_of}" in result.stderr
    pinned = state_hash(policy_files(tmp_path / "student"))
    config = await desk.stage.scenario.of(OWNER).runs.config_of(RunId(2))
    assert config.base_model_hash == pinned
    (tmp_path / "student" / "lineage.json").unlink()
    assert state_hash(policy_files(tmp_path / "student")) != pinned


async def funds_of(chain: Chain, run: int) -> int:
    ((available, _),) = await chain.read("RewardEscrow", "fundsOf", [run])
    return int(available)


@pytest.mark.parametrize("confirmations", [0, 3])
async def test_funds_go_to_the_own_run_whatever_number_a_reorganisation_gives_it(
    desk: Desk, confirmations: int
) -> None:
    scenario = desk.stage.scenario
    chain, rival, rpc = scenario.of(OWNER), scenario.of(CHALLENGER), scenario.rpc
    before = await rpc.call("evm_snapshot")
    looks: list[float] = []

    async def reorganised(pause_s: float) -> None:
        looks.append(pause_s)
        if len(looks) == 1:
            assert await desk.runs() == 2
            await rpc.call("evm_revert", before)
            assert (await rival.runs.create_run(scenario.config()))[0] == 2
        await rpc.call("evm_mine")

    wei = 2 * TOKEN
    run_id = await create_and_fund(
        chain, scenario.config(), wei, confirmations=confirmations, sleep=reorganised
    )
    assert run_id == (3 if confirmations else 2)
    assert await chain.read("RunRegistry", "ownerOf", [run_id]) == (OWNER.address,)
    assert await funds_of(chain, 2) == (0 if confirmations else wei)
    assert await funds_of(chain, run_id) == wei
    assert bool(looks) is bool(confirmations)


async def test_run_that_is_not_confirmed_in_time_is_not_paid_into(desk: Desk) -> None:
    async def nothing(_: float) -> None:
        pass

    chain, config = desk.stage.scenario.of(OWNER), desk.stage.scenario.config()
    with pytest.raises(ChainError, match="run 2 is created, but not confirmed by 1 blocks"):
        await create_and_fund(chain, config, TOKEN, confirmations=1, sleep=nothing)
    assert await funds_of(chain, 2) == 0


async def test_no_leaves_everything_as_it_was(desk: Desk) -> None:
    result = await desk.stage.run("run", "create", desk.file(), run_input="n\n")
    assert result.exit_code == 1
    assert not (desk.folder / "documents").exists()
    assert await desk.runs() == 1


@pytest.mark.parametrize("who", [TRAINER, OWNER])
async def test_who_cannot_pay_for_gas_is_named_before_anything_is_sent(
    desk: Desk, who: Any
) -> None:
    rpc = desk.stage.scenario.of(OWNER).rpc
    await rpc.call("anvil_setBalance", who.address, hex(1))
    error = await desk.refusal("--sample", "0")
    assert f"{who.address} holds" in str(error)
    assert "muster devnet fund" in hint(error)


async def test_flags_go_before_the_file(desk: Desk) -> None:
    words = ("run", "create", desk.file(sample=0), "--yes", "--fund", "1", "--quorum", "3")
    result = await desk.stage.run(*words)
    assert result.exception is None, result.output
    assert "base model  not tried" in result.stderr
    assert "judges      3 of 3 validators must agree" in result.stderr
    run = await desk.stage.json("run", "show", "2")
    assert (run["funds"]["available_wei"], run["terms"]["quorum"]) == (str(TOKEN), 3)


async def test_a_model_that_no_worker_can_load_is_refused(desk: Desk) -> None:
    broken = desk.folder / "broken"
    shutil.copytree(desk.folder / "model", broken)
    (broken / "tokenizer.json").unlink()
    error = await desk.refusal("--sample", "0", model=str(broken))
    assert "has no tokenizer.json" in str(error)
    assert "save_pretrained" in hint(error)
    (broken / "tokenizer.json").write_text("{}")
    assert str(broken) in str(await desk.refusal(model=str(broken)))
    assert "is not a model folder" in str(await desk.refusal(model=str(desk.folder)))


async def test_a_calibration_of_another_model_or_engine_is_refused(desk: Desk) -> None:
    other = desk.folder / "other.json"
    model = CALIBRATION.model.model_copy(update={"hidden_size": 128})
    other.write_bytes(CALIBRATION.model_copy(update={"model": model}).to_bytes())
    error = await desk.refusal(calibration=str(other))
    assert "a Qwen3ForCausalLM of width 64 and vocabulary 16" in str(error)
    assert "the calibration is of a Qwen3ForCausalLM of 128 and 16" in str(error)
    assert "muster calibrate" in hint(error)
    error = await desk.refusal("--engine", "vllm:float32")
    assert "the run is calibrated for test, not for vllm:float32" in str(error)


def chat_run(desk: Desk, *, template: str | None = None) -> dict[str, Any]:
    """Write a chat model, its calibration and a recipe; return what RUN.toml says of them."""
    folder, tokenizer = desk.folder / "chat", make_word_tokenizer()
    if template is not None:
        tokenizer.chat_template = template or None
    build_chat_model(folder / "model", tokenizer, seed=2)
    shape = {"vocab_size": len(tokenizer)}
    calibration = CALIBRATION.model_copy(
        update={"model": CALIBRATION.model.model_copy(update=shape)}
    )
    (folder / "calibration.json").write_bytes(calibration.to_bytes())
    text = (ROOT / "configs" / "demo.toml").read_text()
    prompt = "[prompt]\nform = 'chat'\nsystem = '0=0'\nthinking = 'on'\nanswer_after = '</think>'"
    (folder / "recipe.toml").write_text(f"{text}\n{prompt}\n")
    return {
        "model": str(folder / "model"),
        "recipe": str(folder / "recipe.toml"),
        "calibration": str(folder / "calibration.json"),
    }


async def test_a_chat_run_is_created_and_worked_for(desk: Desk) -> None:
    values = chat_run(desk)
    result = await desk.stage.run("run", "create", desk.file(**values), "--yes", "--json")
    assert result.exception is None, result.output
    pinned = json.loads(result.stdout.splitlines()[-1])["recipe_hash"]
    recipe = Recipe.from_bytes((desk.folder / "documents" / pinned[2:]).read_bytes())
    assert recipe.prompt.frame.end == "<|im_end|>\n<|im_start|>assistant\n"
    problems = TaskSet.open(desk.folder / "tasks.jsonl")
    rules = Rules(recipe, problems, CALIBRATION)
    worker, *validators = (TransformersEngine() for _ in range(3))
    for engine in (worker, *validators):
        engine.load_policy(Path(values["model"]), PolicyVersion(0))
    rows = play_ticket(ticket(0), recipe, problems, worker).graded()
    assert [judge(rows, ticket(0), rules, each).finding for each in validators] == [None, None]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "has no chat template"),
        ("{{ strftime_now('%Y') }}", "strftime_now' is undefined"),
        ("{{ raise_exception }}", "does not write the same every time"),
    ],
)
async def test_a_chat_template_that_no_run_can_rest_on_is_refused(
    desk: Desk, template: str, said: str
) -> None:
    error = await desk.refusal("--sample", "0", **chat_run(desk, template=template))
    assert said in str(error)


async def test_a_submission_that_exceeds_its_file_is_refused(desk: Desk) -> None:
    recipe = load_recipe(ROOT / "configs" / "demo.toml")
    text = (ROOT / "configs" / "demo.toml").read_text()
    long = desk.folder / "long.toml"
    long.write_text(
        text.replace(
            f"max_new_tokens = {recipe.sampling.max_new_tokens} ", "max_new_tokens = 100000 "
        )
    )
    error = await desk.refusal(recipe=str(long))
    assert "a submission of 128 samples of 100000 tokens can take" in str(error)
    assert "the limit is 64 MiB" in str(error)
    assert "problems_per_submission = 3" in hint(error)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quorum": 4}, "a quorum of 4 of 3 validators is impossible"),
        ({"fund": "1,000,000,000,000"}, "tokens, 1,000,000,000,000 are to be paid in"),
        ({"trainer": CHALLENGER.address}, "trainer_keystore holds"),
        ({"price": None}, "setting 'price' is missing"),
    ],
)
async def test_terms_and_people_that_do_not_fit_are_refused(
    desk: Desk, changes: dict[str, Any], said: str
) -> None:
    error = await desk.refusal("--sample", "0", **changes)
    assert said in str(error)
