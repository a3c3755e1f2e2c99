"""A network under attack serves the honest; every hostile client of the page has its test.

All attacks together need a machine of their own: eleven processes, one of which attacks. `make
test` plays those that need sockets only (test_hostile_sockets), and each attack by itself.
"""

from pathlib import Path

import pytest
from postgres_server import PostgresServer

from muster.lab.redteam.hostile.catalogue import NUISANCES, table
from muster.lab.redteam.hostile.network import SERVED, play
from muster.lab.redteam.hostile.together import attack
from muster.lab.redteam.report import PAGE

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
async def test_honest_are_served_and_judged_while_all_attack_together(tmp_path: Path) -> None:
    with PostgresServer() as server:
        story = await play(tmp_path, attack, seconds=15, database_url=server.create())
    assert story.calm.served_min == 1
    assert story.attacked.served_min >= SERVED
    # The attackers use the same cores; they succeed if less than half as much is judged.
    assert story.attacked.judged >= story.calm.judged / 2
    attacks = {name.partition(":")[0] for name, number in story.attacked.answers.items() if number}
    assert attacks == {
        "bodies without signature", "bodies of strangers", "bodies of the node",
        "silent connections", "one request, then silence", "event streams",
        "messages that cannot be stored", "bad files",
    }  # fmt: skip


@pytest.mark.parametrize("shown", sorted({each.shown for each in NUISANCES}))
def test_what_the_page_names_is_there(shown: str) -> None:
    assert "def test_" in (TESTS / shown).read_text()


def test_page_tells_each_of_them() -> None:
    assert table() in PAGE.read_text()
