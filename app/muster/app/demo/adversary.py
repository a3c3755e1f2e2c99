"""Dishonest workers: the real worker with a few methods overridden, each for one way of cheating.

    python -m muster.app.demo.adversary KIND <flags of `muster worker run`>

Every kind is fraud by docs/protocol.md section 8: validators must detect it, and the ledger must
slash it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from muster.api import Lease, NoWork
from muster.client.worker.loop import WorkerLoop
from muster.inference import Request
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import Ticket
from muster.protocol.rollouts import Rollout

TOPLOC_MODULUS = 65_497
STALE_BY = 4
"""Age in versions. One warm-up step changes the policy too little for fraud: it is only
rejected."""
TYPICAL_PATTERN = 0x4030
"""The bfloat16 pattern of 2.75, which is near the cut of the largest values of a normed row."""


class OtherModel(WorkerLoop):
    """Serves another model's tokens and proofs: the policy with its weights disturbed."""

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Load the policy, then disturb it."""
        await super().load(folder, version)
        await self.compute.run(_disturb, self.context.engine.model)  # type: ignore[attr-defined]


class StalePolicy(WorkerLoop):
    """Never loads a second policy, to save the downloads. Starts to work when its policy is
    stale."""

    async def lease(self) -> Lease | NoWork:
        """Ask for work once the loaded policy is `STALE_BY` versions old."""
        if (self.context.view.runs[self.context.run_id].latest_version or 0) >= STALE_BY:
            return await super().lease()
        if newest := self._newest():
            async with self.policy(*newest):
                pass
        return NoWork(retry_after_s=self.context.poll_s)

    def version_at_hand(self) -> PolicyVersion | None:
        """Ask for tickets of the newest policy."""
        return None

    @asynccontextmanager
    async def policy(self, version: PolicyVersion, root: Hash32) -> AsyncIterator[None]:
        """Keep the first policy loaded, whichever one is requested."""
        async with super().policy(*(self.station.loaded or (version, root))):
            yield


class ConstantProof(WorkerLoop):
    """Samples honestly, but with proofs that need no computation: constant polynomials."""

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Replace every proof."""
        rollouts = await super().generate(ticket)
        return [
            replace(r, proofs=_constant(r.proofs, self.context.rules.recipe.proof.topk))
            for r in rollouts
        ]


class ForgedReward(WorkerLoop):
    """Claims that every answer is right."""

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Set every reward to 1."""
        return [replace(r, task_reward=1.0) for r in await super().generate(ticket)]


class OwnProblem(WorkerLoop):
    """Answers one problem of its choice over and over."""

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Put the first group's rollouts in the place of all others."""
        rollouts = await super().generate(ticket)
        size = self.context.rules.recipe.sampling.samples_per_problem
        return [replace(rollouts[i % size], group=i // size) for i in range(len(rollouts))]


class BestOfMany(WorkerLoop):
    """Samples wrong answers again under other seeds and keeps the right ones."""

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Replace wrong answers by right ones of the same group, seeds unchanged."""
        rollouts = await super().generate(ticket)
        best = {r.group: r for r in rollouts if r.task_reward == 1.0}
        again = [i for i, r in enumerate(rollouts) if r.task_reward < 1.0 and r.group in best]
        for i in again:
            good = best[rollouts[i].group]
            rollouts[i] = replace(
                good, sample=rollouts[i].sample, sampling_seed=rollouts[i].sampling_seed
            )
        return rollouts


class GreedyDecoder(WorkerLoop):
    """Decodes almost greedily instead of at the recipe's temperature, for more reward."""

    @asynccontextmanager
    async def policy(self, version: PolicyVersion, root: Hash32) -> AsyncIterator[None]:
        """Lower the temperature of every request once the policy is loaded and tested."""
        engine, honest = self.context.engine, self.context.engine.generate

        def cold(requests: list[Request], **options: Any) -> Any:
            return honest([replace(r, temperature=r.temperature / 10) for r in requests], **options)

        async with super().policy(version, root):
            engine.generate = cold  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                engine.generate = honest  # type: ignore[method-assign]

    async def check(self, rollouts: list[Rollout], generating_s: float) -> None:
        """Skip the self-check, which would fail."""


KINDS: dict[str, type[WorkerLoop]] = {
    "other-model": OtherModel,
    "stale-policy": StalePolicy,
    "constant-proof": ConstantProof,
    "forged-reward": ForgedReward,
    "own-problem": OwnProblem,
    "best-of-many": BestOfMany,
    "greedy-decoder": GreedyDecoder,
}
"""Ways of cheating by name."""


def _disturb(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_(noise.to(parameter.dtype) * parameter.std() * 0.3)


def _constant(proofs: bytes, topk: int) -> bytes:
    """Return proofs of the same lengths that claim the same value at every position."""
    size = 2 + 2 * topk
    parts = [proofs[i : i + size] for i in range(0, len(proofs), size)]
    constant = TOPLOC_MODULUS.to_bytes(2, "big") + TYPICAL_PATTERN.to_bytes(2, "big")
    return b"".join(constant + bytes(len(part) - len(constant)) for part in parts)


def adversary_command() -> click.Command:
    """Return the command: `muster worker run` with the kind as its first argument."""
    from muster.client.cli.worker import worker

    honest = worker.commands["run"]
    kind = click.Argument(["kind"], type=click.Choice(list(KINDS)))
    return click.Command("adversary", params=[kind, *honest.params], callback=_run)


def _run(
    kind: str, config: Path | None, keystore: Path, password_file: Path | None, **flags: Any
) -> None:
    from muster.client.settings import WorkerSettings
    from muster.client.worker.process import run_worker
    from muster.lifecycle import run_until_stopped
    from muster.settings import load_settings
    from muster.telemetry import setup_logging
    from muster.wallet import open_wallet

    given = {name: value for name, value in flags.items() if value != ()}
    # The cheats work on one ticket at a time.
    given["tickets_per_engine"] = 1
    settings = load_settings(WorkerSettings, file=config, flags=given, env_prefix="MUSTER_WORKER_")
    node = open_wallet(keystore, password_file)
    setup_logging("adversary")
    run_until_stopped(lambda: run_worker(settings, node, loop_class=KINDS[kind]))


if __name__ == "__main__":
    from muster.app.cli import main

    main(adversary_command())
