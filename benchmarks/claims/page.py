"""docs/claims.md: the rows of `benchmarks.claims.rows`, with the figures of results/*.json."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from benchmarks.claims.rows import CLAIMS, PLOTS, TOPICS, Claim, Verdict
from benchmarks.report import RESULTS, ROOT

PAGE = ROOT / "docs" / "claims.md"

HEAD = """# Claims, measured again

Made by `make claims` of [benchmarks/claims](../benchmarks/claims/rows.py). Each row is a claim of
INTELLECT-2 or of a work behind it, in our words: its source, what is measured here that
corresponds to it, the figure, and whether the claim holds *here*. Nothing here has the size of the
papers: models have 0.1 to 600 million parameters, and everything runs on two CPU cores. A claim
that holds at this size may fail at theirs, and the reverse.

| source | |
|---|---|
| I2 | INTELLECT-2, arXiv 2505.07291, and its release post |
| TOPLOC | arXiv 2501.16007, abstract, and its release post |
| S1 | SYNTHETIC-1 and GENESYS, release post |
| S2 | SYNTHETIC-2, release post |
| I1 | INTELLECT-1, arXiv 2412.01152, abstract, and its release post |

The full text of I2 was not available: its claims are from its abstract, its posts and digests
of it, and its sections are named by their subjects. A verdict is *holds*, *in part* (the row says
where), *does not hold*, or *cannot be tried* on this machine.
"""


class Figures(dict[str, Any]):
    """A result file's metrics by id. `1/ID` is the inverse; `detail/KEY/…` reads the detail, where
    `KEY=VALUE` selects the element of a list with this value.
    """

    def __missing__(self, key: str) -> Any:
        first, _, rest = key.partition("/")
        if first == "1":
            return 1 / self[rest]
        if first != "detail":
            raise KeyError(key)
        value = self.detail
        for step in rest.split("/"):
            name, is_choice, wanted = step.partition("=")
            value = (
                next(each for each in value if each[name] == wanted) if is_choice else value[step]
            )
        return value

    detail: Any = None
    """Details behind the metrics."""


@cache
def results() -> Mapping[str, Figures]:
    """Return the figures of all result files, by their names."""
    found = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        found[path.stem] = Figures(document["metrics"])
        found[path.stem].detail = document["detail"]
    return found


def figure_of(claim: Claim) -> str:
    """Return a row's figure; raises KeyError when no result file holds an id."""
    return claim.figure.format(**results())


def render() -> str:
    """Return the page."""
    parts = [HEAD, _summary(CLAIMS)]
    for topic, title in TOPICS.items():
        parts.append(f"## {title}\n")
        rows = [_row(claim) for claim in CLAIMS if claim.topic == topic]
        parts.append(
            "| claim | source | measured here | figure | command | verdict |\n"
            "|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
        parts += [f"![{alt}](images/{name}.svg)\n" for name, alt in PLOTS.get(topic, {}).items()]
    parts.append(_places(CLAIMS))
    return "\n".join(parts)


def _row(claim: Claim) -> str:
    cells = (
        claim.claim,
        claim.source,
        claim.measured,
        figure_of(claim),
        f"`{claim.command}`",
        f"**{claim.verdict}**" + (f": {claim.why}" if claim.why else ""),
    )
    return "| " + " | ".join(cells) + " |"


def _summary(claims: Iterable[Claim]) -> str:
    counts = Counter(claim.verdict for claim in claims)
    said = [f"{verdict}: {counts[verdict]}" for verdict in Verdict]
    return f"{counts.total()} claims. {', '.join(said).capitalize()}.\n"


def _places(claims: Iterable[Claim]) -> str:
    files = sorted({name for claim in claims for name in claim.files})
    rows = []
    for name in files:
        document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        link = f"[{name}.json](../benchmarks/results/{name}.json)"
        rows.append(f"| {link} | {document['machine']} | {document['date']} |")
    return (
        "## Where the figures are from\n\n"
        "| file | machine, shared with other programs | date |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def write_page() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")
    print(f"\n{PAGE.relative_to(ROOT)}: {_summary(CLAIMS).strip()}")
