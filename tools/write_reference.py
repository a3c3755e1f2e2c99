"""Writes docs/reference/: recipe, settings, figures, audits, contracts' parameters, HTTP API.

    make docs

The pages are generated from the code alone; a test fails when they are out of date.
"""

import ast
import inspect
import json
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

from muster.app.run_file import VARIABLES, RunFile
from muster.client.audit.contradictions import Kind
from muster.client.audit.write_tables import TABLES
from muster.client.network_file import AMOUNTS
from muster.client.quantities import format_duration, format_tokens
from muster.client.relay import RelaySettings
from muster.client.settings import JurorSettings, ValidatorSettings, WorkerSettings
from muster.deploy import BOUNDS, PROFILES, Bound, DeployParameters
from muster.orchestrator.http.app import openapi_document
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.mixture import CurriculumPoint, PartFilters, PartRecipe, TasksRecipe
from muster.protocol.recipe import (
    AdapterRecipe,
    BreakerRecipe,
    ChatFrame,
    FilterRecipe,
    HardwareRecipe,
    PromptRecipe,
    ProofRecipe,
    Recipe,
    SamplingRecipe,
    TrainingRecipe,
    VerifierIdentity,
)
from muster.protocol.sft import SftRecipe, SftRows, SftSampling, SftTraining
from muster.trainer.config import TrainerSettings
from muster.trainer.measure.figures import EVALUATION, PREFIX, STEP, Figure

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
MADE = "*Written by `make docs` from the code; changes here are lost.*"

RECIPE_PARTS: dict[str, type[BaseModel]] = {
    "": Recipe,
    "[sampling]": SamplingRecipe,
    "[tasks]": TasksRecipe,
    "[[tasks.parts]]": PartRecipe,
    "[[tasks.parts.curriculum]]": CurriculumPoint,
    "[tasks.parts.filters]": PartFilters,
    "[prompt]": PromptRecipe,
    "[prompt.frame]": ChatFrame,
    "[proof]": ProofRecipe,
    "[training]": TrainingRecipe,
    "[filters]": FilterRecipe,
    "[adapter]": AdapterRecipe,
    "[hardware]": HardwareRecipe,
    "[breaker]": BreakerRecipe,
    "[[verifiers]]": VerifierIdentity,
}
"""Parts of a recipe by their TOML table."""

SFT_PARTS: dict[str, type[BaseModel]] = {
    "": SftRecipe,
    "[rows]": SftRows,
    "[training]": SftTraining,
    "[sampling]": SftSampling,
}
"""Parts of an SFT recipe by their TOML table, without those that it shares with recipes."""

SETTINGS: dict[str, tuple[type[BaseModel], str]] = {
    "muster worker run": (WorkerSettings, "MUSTER_WORKER_"),
    "muster validator run": (ValidatorSettings, "MUSTER_VALIDATOR_"),
    "muster juror run": (JurorSettings, "MUSTER_JUROR_"),
    "muster relay run": (RelaySettings, "MUSTER_RELAY_"),
    "muster orchestrator run": (OrchestratorSettings, "MUSTER_ORCHESTRATOR_"),
    "muster trainer run": (TrainerSettings, "MUSTER_TRAINER_"),
    "muster run create": (RunFile, VARIABLES),
}
"""Settings of each process and of a run's file, with the prefix of their environment variables."""


def config_page() -> str:
    """Return the page of recipe and settings."""
    parts = [
        "# Configuration",
        MADE,
        "## Recipe\n\nA TOML file; `muster run create` pins its canonical form on chain. "
        "`muster trainer run --dry-run` prints it resolved, with its hash.",
    ]
    parts += [_section(table, model) for table, model in RECIPE_PARTS.items()]
    parts.append(
        "## SFT recipe\n\nA TOML file of `muster trainer sft`. `[prompt]`, `[adapter]` are as in "
        "a recipe."
    )
    parts += [_section(table, model) for table, model in SFT_PARTS.items()]
    parts.append(
        "## Settings\n\nOf one process: defaults < TOML file (`--config`, or `RUN.toml`) < "
        "environment < flags. A variable is the prefix and the name in capitals; commas separate "
        "the values of a list. Most fields have a flag of their name with dashes."
    )
    for command, (model, prefix) in SETTINGS.items():
        parts.append(f"### `{command}`\n\nPrefix `{prefix}`.\n\n{_table(model)}")
    return "\n\n".join(parts) + "\n"


def _section(table: str, model: type[BaseModel]) -> str:
    return f"### {f'`{table}`' if table else 'Top level'}\n\n{_table(model)}"


def metrics_page() -> str:
    """Return the page of the trainer's figures."""
    return (
        "\n\n".join(
            [
                "# Figures of the trainer",
                MADE,
                "One name everywhere: a line of `metrics.jsonl` per step and evaluation "
                "(`dropped`, `pools`, `part` and `eval` are objects there), the orchestrator's "
                f"`/v1/metrics`, W&B, and gauges `{PREFIX}<name>` of the trainer's own endpoint "
                "(`--metrics-port`). There, samples left out are the counter "
                f"`{PREFIX}dropped_samples_total` by `reason`, and "
                f"`{PREFIX}trained_tokens_total` counts tokens. P stands for a part of the "
                f'task set: `part_math_reward` is `{PREFIX}part_reward{{part="math"}}` there.',
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


def _sentences(model: type) -> Iterator[tuple[str, str]]:
    """Yield each field of a class and its base classes, with the docstring under it."""
    for owner in reversed(model.__mro__):
        if owner in (object, dict, BaseModel):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                yield field.target.id, " ".join(str(text.value.value).split())


def type_name(annotation: Any) -> str:
    """Return a type as people write it: without bounds, with literals spelled out."""
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
    """Return the page about the contradictions and tables of an audit."""
    kinds = "\n".join(f"| `{kind}` | {_escaped(kind.rule)} |" for kind in Kind)
    tables = "\n".join(
        f"\n### {name}\n\n| column | meaning |\n|---|---|\n"
        + "\n".join(f"| `{column}` | {_escaped(text)} |" for column, text in _sentences(row))
        for name, row in TABLES.items()
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

`muster audit run ID --export FOLDER --format csv|parquet` writes one file per table. Columns keep
their names and order. Wei are decimal text, for they do not fit 64 bits; hashes and addresses are
`0x` hexadecimal; times are Unix seconds of the chain's clock; what does not apply is null, empty in
CSV.
{tables}
"""


def deployment_page() -> str:
    """Return the page about the contracts' deployment parameters."""
    about = "\n".join(f"* `{name}`: {profile.about}." for name, profile in PROFILES.items())
    sentences = dict(_sentences(DeployParameters))
    profiles = {
        name: DeployParameters.model_validate(profile.defaults)
        for name, profile in PROFILES.items()
    }
    rows = [
        f"| `{name}` | "
        + " | ".join(_worded(name, getattr(profiles[profile], name)) for profile in PROFILES)
        + f" | {_escaped(sentences[name])} |"
        for name in BOUNDS
    ]
    heads = f"| parameter | {' | '.join(f'`{name}`' for name in PROFILES)} | |"
    bounds = [_bound_row(name, "all", bound) for name, bound in BOUNDS.items()]
    bounds += [
        _bound_row(name, f"`{profile}`", bound)
        for profile, kind in PROFILES.items()
        for name, bound in kind.bounds.items()
    ]
    return f"""# What a network's contracts are fixed to

{MADE}

In the file that `muster contracts deploy` reads ([the guide](../guides/deploy.md)), below
`[parameters]`. Times are seconds or text (`"6 h"`, of s, min, h, d), amounts are token wei or text
(`"100 tokens"`), shares are millionths.

{about}

## Parameters and each profile's defaults

{heads}
|---|{"---|" * (len(PROFILES) + 1)}
{chr(10).join(rows)}

## Bounds, and why

| parameter | profile | from | to | why |
|---|---|---|---|---|
{chr(10).join(bounds)}

Between parameters:

* `unbonding_s`, `claim_period_s` and `change_delay_s` outlast judgement: `outcome_deadline_s` +
  `challenge_window_s` + `vote_commit_s` + `vote_reveal_s` + `slash_pause_s`; the claim period a
  challenge window more. Else stake could leave before its fraud is judged.
* `slash_cooldown_s` is no less than `challenge_window_s`: pauses would reopen what is final.
* `insurance_ppm` and `reporter_ppm` are no more than the whole together; the rest is burned.
"""


def _bound_row(name: str, profile: str, bound: Bound) -> str:
    least, most = _worded(name, bound.least), _worded(name, bound.most)
    return f"| `{name}` | {profile} | {least} | {most} | {_escaped(bound.reason)} |"


def _worded(name: str, value: int | None) -> str:
    if value is None:
        return "the longer of challenge window and pause"
    if value >= 1 << 39:
        power = value.bit_length()
        if value + 1 == 1 << power:
            return f"2^{power} - 1"
        if value == 1 << (power - 1):
            return f"2^{power - 1}"
    if name in AMOUNTS:
        return f"{value} wei" if 0 < value < 10**12 else f"{format_tokens(value)} tokens"
    return format_duration(value) if name.endswith("_s") else str(value)


def openapi_page() -> str:
    """Return the OpenAPI document of the orchestrator, as JSON."""
    return json.dumps(openapi_document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


PAGES = {
    "config.md": config_page,
    "metrics.md": metrics_page,
    "audit.md": audit_page,
    "deployment.md": deployment_page,
    "openapi.json": openapi_page,
}
"""The generated pages, by file name."""


def main() -> None:
    """Write the pages."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
        sys.stdout.write(f"{REFERENCE / name}\n")


if __name__ == "__main__":
    main()
