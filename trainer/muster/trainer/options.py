"""Options that several of the trainer's commands have."""

from collections.abc import Callable
from typing import Any

import click


def memory_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags that decide how much memory training takes."""
    options = (
        click.option(
            "--micro-batch-tokens",
            type=click.IntRange(1),
            help="Tokens of a micro-batch. [default: as many as fit]",
        ),
        click.option(
            "--recompute",
            type=click.Choice(["none", "selective", "full", "host"]),
            help="Activations to recompute. [default: the least that fits]",
        ),
        click.option(
            "--optimizer-state",
            type=click.Choice(["float32", "bfloat16"]),
            help="Format of the optimiser's moments. [default: float32]",
        ),
        click.option(
            "--offload/--no-offload",
            default=None,
            help="Keep the optimiser's moments in a file. [default: in memory]",
        ),
        click.option(
            "--memory-gb",
            type=click.FloatRange(0, min_open=True),
            help="Memory to plan for, in GB. [default: all that is free]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


context_option = click.option(
    "--context-ranks",
    type=click.IntRange(1),
    default=1,
    help="Ranks that share each row.",
)

peak_option = click.option(
    "--peak-tflops",
    type=click.FloatRange(0, min_open=True),
    help="Peak TFLOP/s of a device. [default: measured]",
)

dtype_option = click.option(
    "--compute-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Number format of the passes. [default: float32]",
)
