"""`muster run`: what everybody sees of runs, and what their owners do."""

from __future__ import annotations

import click

from muster.devnet.lazy import Lazy, LazyGroup

COMMANDS = {
    "list": Lazy("muster.client.runs:runs_list", "Which runs there are, what they pay."),
    "show": Lazy("muster.client.runs:runs_show", "Everything the chain says about a run."),
    "base-model": Lazy("muster.trainer.cli:run_base_model", "Build the demo's base model."),
    "create": Lazy("muster.devnet.run_create:create", "Create, fund and publish a run."),
    "fund": Lazy("muster.client.owner_cli:fund", "Pay tokens into a run."),
    "change": Lazy("muster.client.owner_cli:change", "Announce, apply or drop other terms."),
    "rotate": Lazy("muster.client.owner_cli:rotate", "Replace trainer or orchestrator."),
    "invite": Lazy("muster.client.owner_cli:invite", "Let an account take a validator's seat."),
    "dismiss": Lazy("muster.client.owner_cli:dismiss", "Take a validator's seat."),
    "pause": Lazy("muster.client.owner_cli:pause", "Stop submissions, or slashing."),
    "resume": Lazy("muster.client.owner_cli:resume", "Take submissions again."),
    "recover": Lazy("muster.client.owner_cli:recover", "Free what nobody earned."),
    "close": Lazy("muster.client.owner_cli:close", "End a run, for good."),
    "reclaim": Lazy("muster.client.owner_cli:reclaim", "Pay out what is left of a closed run."),
}


@click.group(cls=LazyGroup, commands_=COMMANDS)
def run() -> None:
    """Look at runs, create your own, and lead it to its end."""
