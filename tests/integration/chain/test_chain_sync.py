"""A first sync through a public endpoint, killed again and again, gives the undisturbed view.

The same program reads a million events, killed ten times: `make bench-sync`.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_killed_sync_goes_on_and_sees_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chain.sync", "--events", "20000", "--kills", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "killed 2 times" in done.stdout
    assert re.search(r"the same 20000 events of 200 owners, [0-9a-f]{16}", done.stdout)
    # The endpoint really showed the faults that the sync must survive.
    assert "answers refused for their size" in done.stdout
    assert "batches refused" in done.stdout
