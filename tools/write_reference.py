"""Writes docs/reference/: fields of recipe and settings, the trainer's figures, what audits find.

    make docs

The pages are made of the code alone, so they say what it does; a test fails when they are older.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from muster.client.audit.contradictions import RULES
from muster.client.audit.export import COLUMNS
from muster.client.relay import RelaySettings
from muster.client.settings import ValidatorSettings, WorkerSettings
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.recipe import (
    AdapterRecipe,
    BreakerRecipe,
    FilterRecipe,
    HardwareRecipe,
    ProofRecipe,
    Recipe,
    SamplingRecipe,
    TrainingRecipe,
    VerifierIdentity,
)
from muster.trainer.config import TrainerSettings
from muster.trainer.metric_names import EVALUATION, PREFIX, STEP, Figure

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MADE = "*Written by `make docs` from the code; changes here are lost.*"

RECIPE_PARTS: dict[str, type[BaseModel]] = {
    "": Recipe,
    "[sampling]": SamplingRecipe,
    "[proof]": ProofRecipe,
    "[training]": TrainingRecipe,
    "[filters]": FilterRecipe,
    "[adapter]": AdapterRecipe,
    "[hardware]": HardwareRecipe,
    "[breaker]": BreakerRecipe,
    "[[verifiers]]": VerifierIdentity,
}
"""Parts of a recipe by their TOML table."""

SETTINGS: dict[str, tuple[type[BaseModel], str]] = {
    "muster worker run": (WorkerSettings, "MUSTER_WORKER_"),
    "muster validator run": (ValidatorSettings, "MUSTER_VALIDATOR_"),
    "muster relay run": (RelaySettings, "MUSTER_RELAY_"),
    "muster orchestrator run": (OrchestratorSettings, "MUSTER_ORCHESTRATOR_"),
    "muster trainer run": (TrainerSettings, "MUSTER_TRAINER_"),
}
"""Settings of each process, and the prefix of their environment variables."""


def config_page() -> str:
    """Return the page of recipe and settings."""
    parts = [
        "# Configuration",
        MADE,
        "## Recipe\n\nA TOML file; `muster run create` pins its canonical form on chain. "
        "`muster trainer run --dry-run` prints it resolved, with its hash.",
    ]
    for table, model in RECIPE_PARTS.items():
        parts.append(f"### {f'`{table}`' if table else 'Top level'}\n\n{_table(model)}")
    parts.append(
        "## Settings\n\nOf one process: defaults < TOML file (`--config`) < environment < flags. "
        "A flag is the field's name with dashes, a variable the prefix and the name in capitals."
    )
    for command, (model, prefix) in SETTINGS.items():
        parts.append(f"### `{command}`\n\nPrefix `{prefix}`.\n\n{_table(model)}")
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return the page of the trainer's figures."""
    return (
        "\n\n".join(
            [
                "# Figures of the trainer",
                MADE,
                "One name everywhere: a line of `metrics.jsonl` per step and evaluation "
                "(`dropped`, `pools` and `eval` are objects there), the orchestrator's "
                f"`/v1/metrics`, W&B, and gauges `{PREFIX}<name>` of the trainer's own endpoint "
                "(`--metrics-port`). There, samples left out are the counter "
                f"`{PREFIX}dropped_samples_total` by `reason`, and "
                f"`{PREFIX}trained_tokens_total` counts tokens.",
                f"## Of every training step\n\n{_figures(STEP)}",
                f"## Of every evaluation\n\n{_figures(EVALUATION)}",
            ]
        )
        + "\n"
    )


def _figures(figures: typing.Mapping[str, Figure]) -> str:
    rows = [
        f"| `{name}` | {figure.unit} | {figure.meaning.replace('|', '&#124;')} |"
        for name, figure in figures.items()
    ]
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])


def _table(model: type[BaseModel]) -> str:
    sentences = dict(_sentences(model))
    rows = [
        f"| `{name}` | {_escaped(type_name(field.annotation))} | {_default(field)} | "
        f"{_bounds(field)} | {_escaped(sentences[name])} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join(["| field | type | default | bounds | |", "|---|---|---|---|---|", *rows])


def _sentences(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield each field and the text under it, of the class and those it extends."""
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                yield field.target.id, " ".join(str(text.value.value).split())


def type_name(annotation: Any) -> str:
    """Return a type as people write it: bounds left out, literals spelled."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in arguments if a is not type(None))
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if isinstance(annotation, typing.NewType):
        return type_name(annotation.__supertype__)
    names = {"str": "text", "bool": "true or false", "Path": "path", "float": "number"}
    return names.get(annotation.__name__, annotation.__name__)


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "*required*"
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _bounds(field: FieldInfo) -> str:
    own = [_bound(rule) for rule in field.metadata]
    each = [
        f"each {_bound(rule)}"
        for part in typing.get_args(field.annotation)
        if typing.get_origin(part) is typing.Annotated
        for info in typing.get_args(part)[1:]
        for rule in getattr(info, "metadata", [])
    ]
    return ", ".join(filter(None, [*own, *each]))


def _bound(rule: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥"}
    signs["max_length"] = "length ≤"
    return ", ".join(
        f"{sign} {getattr(rule, name)}"
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    )


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;")


def audit_page() -> str:
    """Return the page of what an audit finds and exports."""
    kinds = "\n".join(f"| `{kind}` | {_escaped(rule)} |" for kind, rule in RULES.items())
    tables = "\n".join(
        f"\n### {name}\n\n| column | meaning |\n|---|---|\n"
        + "\n".join(f"| `{column}` | {_escaped(text)} |" for column, text in columns.items())
        for name, columns in COLUMNS.items()
    )
    return f"""# What an audit finds and exports

{MADE}

How to audit: [the guide](../guides/audit.md).

## Contradictions

Every one has a kind, what was found, and where: transaction, block, batch, position. The kinds are
stable.

| kind | the rule that is broken |
|---|---|
{kinds}

## Tables

`muster audit run ID --export FOLDER --format csv|parquet|json` writes one file per table (`json`:
one object per line). Columns keep their names and order. Wei are decimal text, for they do not fit
64 bits; hashes and addresses are `0x` hexadecimal; times are Unix seconds of the chain's clock;
what does not apply is null, empty in CSV.
{tables}
"""


PAGES = {"config.md": config_page, "metrics.md": metrics_page, "audit.md": audit_page}
"""What is written, by file name."""


def main() -> None:
    """Write the pages."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
        sys.stdout.write(f"{REFERENCE / name}\n")


if __name__ == "__main__":
    main()
