"""`muster` as a process of its own, with the networks' engine in a worker's place of one.

python tests/integration/network/trap_command.py validator trap run --plan plan.json ...
"""

from functools import partial

from client_network import hash_engine

from muster.app.cli import main
from muster.client.worker import process

if __name__ == "__main__":
    process.run_worker = partial(process.run_worker, engine_factory=hash_engine)
    main()
