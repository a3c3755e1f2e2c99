"""Options that several of the trainer's commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def memory_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that decide how much memory training takes."""
    options = (
        click.option(
            "--micro-batch-tokens",
            type=click.IntRange(1),
            help="Tokens computed together. [default: as many as fit]",
        ),
        click.option(
            "--recompute",
            type=click.Choice(["none", "selective", "full"]),
            help="What is computed again. [default: the least that fits]",
        ),
        click.option(
            "--optimizer-state",
            type=click.Choice(["float32", "bfloat16"]),
            help="Format of the optimiser's moments. [default: float32]",
        ),
        click.option(
            "--offload/--no-offload",
            default=None,
            help="Keep the moments in a file. [default: in memory]",
        ),
        click.option(
            "--memory-gb",
            type=click.FloatRange(0, min_open=True),
            help="Memory to plan for. [default: what is there]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


context_option = click.option(
    "--context-ranks",
    type=click.IntRange(1),
    default=1,
    help="Of the ranks, how many share rows.",
)

peak_option = click.option(
    "--peak-tflops",
    type=click.FloatRange(0, min_open=True),
    help="Peak of a device. [default: it is measured]",
)

dtype_option = click.option(
    "--compute-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Arithmetic of the passes.",
)
