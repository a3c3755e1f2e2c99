"""Lists of problems set aside: how pools fill them, and how they are published and remade."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from trainer_fakes import (
    KEY,
    FakeRoots,
    make_recipe,
    make_rollouts,
    no_sleep,
    with_filters,
    with_reward,
)
from trainer_world import RUN, World, die, dying

from muster.protocol.eip712 import Domain
from muster.protocol.errors import ConfigError, TaskError
from muster.protocol.ids import Address, Hash32, PolicyVersion
from muster.protocol.mixture import PartFilters, PartRecipe, TasksRecipe
from muster.protocol.recipe import Recipe
from muster.protocol.set_aside import FILE_NAME, SetAside
from muster.shardcast import ChunkStore
from muster.tasks import TaskSet
from muster.tasks.document import SetPart
from muster.tasks.toys import make_sort
from muster.trainer.process import _make_lists
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.publish.publisher import Publisher
from muster.trainer.recover.recovery import catch_up
from muster.trainer.stream.filters import DifficultyPools
from muster.trainer.stream.listing import Lists

V1 = PolicyVersion(1)


def named(count: int) -> TaskSet:
    """A task set of problems p0, p1 and so on."""
    made = make_sort(count, seed=1)
    problems = (p.model_copy(update={"problem_id": f"p{n}"}) for n, p in enumerate(made))
    return TaskSet.of("named", "1", problems)


def skipping(**filters: object) -> Recipe:
    given = {"pool_window": 3, "pool_min_groups": 1, "pool_revisit": 8, **filters}
    return with_filters(make_recipe(max_async_level=8), **given)


def seen(*groups: tuple[str, float, int], part: str = "") -> DifficultyPools:
    """Pools after a number of groups of each problem, with given rewards."""
    pools = DifficultyPools()
    for name, reward, count in groups:
        for _ in range(count):
            pools.note(name, reward, 3, part)
    return pools


def indices(listed: SetAside, size: int) -> set[int]:
    return {index for index in range(size) if index in listed}


def test_problems_of_the_easy_and_the_hard_pool_are_listed() -> None:
    lists = Lists.over(skipping(), named(24))
    pools = seen(("p3", 1.0, 2), ("p5", 0.5, 2), ("p20", 0.0, 1))
    assert indices(lists.of(pools), 24) == {3, 20}
    assert len(lists.of(pools).bits) == 3


def test_problem_comes_back_when_a_group_moves_its_rate() -> None:
    lists, pools = Lists.over(skipping(), named(24)), seen(("p3", 1.0, 2))
    assert indices(lists.of(pools), 24) == {3}
    pools.note("p3", 0.5, 3)
    assert lists.of(pools) == SetAside()


def test_run_that_skips_nothing_has_no_lists() -> None:
    pools = seen(("p3", 1.0, 2))
    assert Lists().of(pools) == SetAside()
    assert Lists.over(skipping(pool_revisit=0), named(24)).of(pools) == SetAside()
    assert Lists.over(skipping(pool_min_groups=3), named(24)).of(pools) == SetAside()


def test_problem_that_the_task_set_does_not_have_is_not_listed() -> None:
    assert Lists.over(skipping(), named(24)).of(seen(("p24", 1.0, 3))) == SetAside()


def test_the_best_known_are_listed_where_not_all_may_be() -> None:
    """Of 24 problems, 3 are not listed; of two with equally many groups the first is listed."""
    groups = [(f"p{n}", 1.0, 1 + (n % 2)) for n in range(24)]
    listed = Lists.over(skipping(), named(24)).of(seen(*groups))
    assert indices(listed, 24) == set(range(24)) - {18, 20, 22}


@given(st.dictionaries(st.integers(0, 30), st.sampled_from([0.0, 0.5, 1.0]), max_size=30))
def test_every_list_holds(rewards: dict[int, float]) -> None:
    recipe, tasks = skipping(), named(24)
    listed = Lists.over(recipe, tasks).of(seen(*((f"p{n}", r, 1) for n, r in rewards.items())))
    assert listed.fault(24, tasks.stretches(recipe), 2) is None


# Mixtures


PARTS = (SetPart("a", "1", 16), SetPart("b", "1", 8))


def mixed(**of_part: PartFilters) -> Recipe:
    parts = tuple(PartRecipe(name=name, filters=of_part.get(name)) for name in ("a", "b"))
    return make_recipe().model_copy(update={"tasks": TasksRecipe(parts=parts)})


def test_each_part_is_listed_by_its_own_filters() -> None:
    tasks = TaskSet.of("mixed", "1", named(24).problems, PARTS)
    pools = seen(("p3", 1.0, 2), ("p13", 0.9, 2), part="a")
    pools.rates |= seen(("p17", 0.0, 2), ("p18", 0.9, 2), part="b").rates
    of_b = PartFilters(pool_window=3, pool_easy=0.8, pool_revisit=4)
    assert indices(Lists.over(mixed(b=of_b), tasks).of(pools), 24) == {17, 18}
    both = mixed(a=PartFilters(pool_window=3, pool_revisit=2), b=of_b)
    assert indices(Lists.over(both, tasks).of(pools), 24) == {3, 17, 18}
    with pytest.raises(TaskError, match="has no part 'a'"):
        Lists.over(both, named(24))


# Published, killed, restored


def fed(world: World) -> World:
    """Problem p0 is solved in half of the samples; p1 in none of the first four, then in all."""
    for seed in range(16):
        rows = make_rollouts(seed)
        world.feed.submit(rows[:4] + with_reward(rows[4:], float(seed > 3)))
    return world


def roots(world: World) -> list[Hash32]:
    found = [world.store.manifest(RUN, PolicyVersion(version)) for version in range(5)]
    return [manifest.root() for manifest in found if manifest]


async def test_published_versions_have_their_lists(tmp_path: Path, model_folder: Path) -> None:
    (model_folder_with_list := tmp_path / "model").mkdir()
    for path in model_folder.iterdir():
        shutil.copy(path, model_folder_with_list)
    (model_folder_with_list / FILE_NAME).write_bytes(b"of another run")
    world = fed(World(tmp_path / "run", model_folder_with_list, skipping()))
    await world.train(4, lists=Lists.over(world.recipe, named(24)))
    manifests = [world.store.manifest(RUN, PolicyVersion(version)) for version in range(5)]
    sizes = [{f.name: f.size for f in m.files}.get(FILE_NAME) for m in manifests if m]
    # The base model has none; the third step solves p1, which is back from then on.
    assert sizes == [None, 3, 3, None, None]
    shelf = PolicyShelf(tmp_path / "run" / "policies")
    assert indices(SetAside((shelf.path(V1) / FILE_NAME).read_bytes()), 24) == {1}


@pytest.mark.parametrize("moment", ["write before", "complete before", "complete after"])
async def test_killed_trainer_publishes_the_same_lists(
    tmp_path: Path, model_folder: Path, moment: str
) -> None:
    undisturbed, killed = (
        fed(World(tmp_path / name, model_folder, skipping())) for name in ("undisturbed", "killed")
    )
    lists = Lists.over(undisturbed.recipe, named(24))
    await undisturbed.train(4, lists=lists)
    await die(dying(killed.parts(lists=lists), moment, 2), steps=4)
    await killed.train(4, lists=lists)
    assert roots(killed) == roots(undisturbed)
    assert len(set(roots(killed))) == 5


async def test_version_whose_folder_is_gone_is_restored_with_its_list(
    tmp_path: Path, model_folder: Path
) -> None:
    world = fed(World(tmp_path, model_folder, skipping()))
    lists = Lists.over(world.recipe, named(24))
    await world.train(2, lists=lists)
    folder = PolicyShelf(tmp_path / "policies").path(PolicyVersion(2))
    before = (folder / FILE_NAME).read_bytes()
    shutil.rmtree(folder)
    await world.train(2, lists=lists)
    assert (folder / FILE_NAME).read_bytes() == before


async def test_list_comes_back_from_the_store(tmp_path: Path, model_folder: Path) -> None:
    """A trainer without its state resumes from published versions, whose files it has."""
    shelf, store, anchor = (
        PolicyShelf(tmp_path / "one"),
        ChunkStore(tmp_path / "store"),
        FakeRoots(),
    )
    shelf.adopt(model_folder)
    weights = shelf.weights(BASE)

    def pieces(formats: object) -> list[object]:
        return [(name, weights[name]) for name in formats]  # type: ignore[attr-defined]

    listed = SetAside.of([1, 9], 24)
    folder = shelf.writing(V1, weights, pieces, listed)()  # type: ignore[arg-type]
    domain = Domain(31337, Address("0x" + "11" * 20))
    publisher = Publisher(store, anchor, run_id=RUN, domain=domain, key=KEY, sleep=no_sleep)
    root = await publisher.publish(V1, folder, 0, 2)
    other = PolicyShelf(tmp_path / "other")
    other.adopt(model_folder)
    assert catch_up(None, {V1: root}, store, other, RUN) is not None
    assert (other.path(V1) / FILE_NAME).read_bytes() == listed.bits


# Where the task set is


class Api:
    """An orchestrator that serves a document, or other bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked = 0

    async def download(self, _document_hash: Hash32, path: Path, *, max_bytes: int) -> None:
        assert len(self.data) < max_bytes
        self.asked += 1
        path.write_bytes(self.data)


def settings(tmp_path: Path, documents: Path | None) -> Any:
    return SimpleNamespace(documents=documents, state_dir=tmp_path / "state")


async def test_task_set_is_downloaded_once(tmp_path: Path) -> None:
    tasks = named(24)
    api: Any = Api(tasks.to_bytes())
    asked = (settings(tmp_path, None), skipping(), tasks.hash(), api)
    first, second = await _make_lists(*asked), await _make_lists(*asked)
    assert first == second == Lists.over(skipping(), tasks)
    assert api.asked == 1
    (tmp_path / "state" / tasks.hash().hex()).write_bytes(b"damaged")
    assert await _make_lists(*asked) == first


async def test_task_set_is_read_from_the_documents(tmp_path: Path) -> None:
    tasks = named(24)
    api: Any = Api(b"")
    tasks.write(tmp_path / tasks.hash().hex())
    asked = (settings(tmp_path, tmp_path), skipping(), tasks.hash(), api)
    assert await _make_lists(*asked) == Lists.over(skipping(), tasks)
    named(20).write(tmp_path / tasks.hash().hex())
    with pytest.raises(ConfigError, match="is not the task set that the chain pins"):
        await _make_lists(*asked)
    assert not api.asked


async def test_another_task_set_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    api: Any = Api(named(20).to_bytes())
    with pytest.raises(ConfigError, match="is not the task set that the chain pins"):
        await _make_lists(settings(tmp_path, None), skipping(), named(24).hash(), api)
    assert not list((tmp_path / "state").iterdir())


async def test_run_that_skips_nothing_needs_no_task_set(tmp_path: Path) -> None:
    api: Any = Api(b"")
    asked = (settings(tmp_path, tmp_path), make_recipe(), named(24).hash(), api)
    assert await _make_lists(*asked) == Lists()
    assert not api.asked
