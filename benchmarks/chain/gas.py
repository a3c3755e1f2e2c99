"""The gas of every operation, beside the goal and the reference protocol's gas.

    make bench-gas

Every figure is the gas of a mined transaction on Anvil, sent by the clients that the programs use,
including base cost and calldata. The reference's figures were measured in the same way on its own
contracts, one submission at a time, because it has no batches and records only rejections. Gas is
exact, so one run is enough.

For `muster economics --chain`, every transaction also has the sizes that decide data fees: zero and
nonzero bytes of calldata, and the length of the signed transaction under FastLZ (OP stack) and
Brotli level 1 (for Nitro, which has its own Brotli; here Arrow's is used).

Writes results/gas.json.
"""

import asyncio
from dataclasses import asdict, dataclass

from benchmarks.chain.gas_network import measure
from benchmarks.report import machine, print_table, write


@dataclass(frozen=True)
class Operation:
    """One line of the table."""

    name: str
    """Name in `gas_network`."""
    what: str
    """Description."""
    goal: int | None = None
    """The most it should cost."""
    reference: int | None = None
    """Gas of the same operation in the reference protocol."""


OPERATIONS = (
    Operation("onboard", "join a run as a worker (reference: 6 transactions)", 260_000, 1_060_000),
    Operation("commit_batch", "commit a batch of any size", 85_000),
    Operation("post_outcomes_1", "outcomes of 1 submission, 3 signatures", 85_000),
    Operation("post_outcomes_64", "outcomes of 64 submissions, 3 signatures"),
    Operation("per_rollout_1024", "per rollout, 64 submissions of 16", 250, 235_174),
    Operation("per_rollout_256", "per rollout, 16 submissions of 16", 800, 235_174),
    Operation("per_rollout_4096", "per rollout, 256 submissions of 16", None, 235_174),
    Operation("submit_direct", "submit without the orchestrator, with a bond", None, 235_174),
    Operation("execute_fraud", "execute a fraud", 140_000, 423_749),
    Operation("finalise_fraud", "release its escrow"),
    Operation("announce", "announce a claim"),
    Operation("claim_case", "claim another ruling: opens a case"),
    Operation("draw", "draw the jury"),
    Operation("commit_vote", "a juror commits", 60_000),
    Operation("reveal_vote", "a juror reveals", 70_000),
    Operation("settle_case", "settle the case"),
    Operation("collect_fee", "a juror's fee"),
    Operation("fine_signer", "fine a signer who was overturned"),
    Operation("split_off", "take work out of a batch that nobody judged"),
    Operation("summon", "call judges of the network for it"),
    Operation("settle_summoned", "settle what they decided"),
    Operation("void_batch", "declare a batch void"),
    Operation("return_bond", "the bond of work that is void"),
    Operation("claim_first", "claim the first leaf of 16 slots", 97_000, 142_733),
    Operation("claim_one", "claim another leaf", 96_000, 84_914),
    Operation("claim_further", "each further leaf in the same call", 20_000),
    Operation("recover_one", "free what was set aside for a rejected leaf"),
    Operation("request_unbond", "request to unbond", 75_000, 169_732),
    Operation("withdraw", "withdraw", 60_000, 54_925),
    Operation("create_run", "create a run that invites 5 validators"),
    Operation("take_seat", "take a seat as a validator"),
    Operation("join_bench", "join the bench as a juror"),
    Operation("approve", "let a contract take tokens"),
    Operation("fund", "fund a run"),
    Operation("deposit", "add to a stake"),
    Operation("publish_checkpoint", "publish a policy version"),
    Operation("post_outcomes_16", "outcomes of 16 submissions, 3 signatures"),
    Operation("post_outcomes_256", "outcomes of 256 submissions, 3 signatures"),
    Operation("claim_16", "claim 16 leaves of one batch"),
    Operation("claim_16_batches", "claim 16 leaves of 16 batches"),
)
METRICS = ("per_rollout_1024", "onboard", "execute_fraud")
"""The ids of the design."""


def main() -> None:
    """Measure, print the table and write the result."""
    gas, taken = asyncio.run(measure())
    rows = [
        [
            operation.what,
            f"{gas[operation.name]:,}",
            "" if operation.goal is None else f"{operation.goal:,}",
            "" if operation.reference is None else f"{operation.reference:,}",
            ""
            if operation.reference is None
            else f"{operation.reference / gas[operation.name]:.1f}",
        ]
        for operation in OPERATIONS
    ]
    print_table("gas per transaction", ["operation", "ours", "goal", "reference", "ratio"], rows)
    detail = {
        operation.name: {
            "gas": gas[operation.name],
            "goal": operation.goal,
            "reference": operation.reference,
        }
        | (asdict(taken[operation.name]) if operation.name in taken else {})
        for operation in OPERATIONS
    }
    print_table(
        "sizes in bytes",
        ["operation", "calldata", "zero", "FastLZ", "Brotli"],
        [
            [
                operation.what,
                f"{size.zero_bytes + size.nonzero_bytes:,}",
                f"{size.zero_bytes:,}",
                f"{size.fastlz_bytes:,}",
                f"{size.brotli_bytes:,}",
            ]
            for operation in OPERATIONS
            if (size := taken.get(operation.name))
        ],
    )
    write("gas", {name: gas[name] for name in METRICS}, detail, measured_on=machine())


if __name__ == "__main__":
    main()
