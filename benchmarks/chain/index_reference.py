"""Reads a vault's deposits with web3.py, in its documented way. Runs in a process of its own.

    python -m benchmarks.chain.index_reference RPC_URL VAULT ARTIFACT FIRST_BLOCK LAST_BLOCK

Prints events, wall and CPU seconds as JSON.
"""

import json
import sys
import time
from pathlib import Path

from web3 import HTTPProvider, Web3

SPAN = 2_000
"""Blocks per request, as many as Muster's reader asks for at first."""


def main(url: str, vault: str, artifact: str, first: str, last: str) -> None:
    """Read, and print what it took."""
    abi = json.loads(Path(artifact).read_text())["abi"]
    contract = Web3(HTTPProvider(url, request_kwargs={"timeout": 600})).eth.contract(
        address=Web3.to_checksum_address(vault), abi=abi
    )
    wall, cpu, events = time.perf_counter(), time.process_time(), 0
    for start in range(int(first), int(last) + 1, SPAN):
        to = min(start + SPAN - 1, int(last))
        events += len(contract.events.Deposited.get_logs(from_block=start, to_block=to))
    taken = {
        "events": events,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
    }
    print(json.dumps(taken))


if __name__ == "__main__":
    main(*sys.argv[1:])
