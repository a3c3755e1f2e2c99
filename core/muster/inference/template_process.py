"""A process that renders a chat template: bounded, without clock, randomness and files.

Executed by its path with a JSON request on standard input, see `muster.inference.framing`. It
imports no module of Muster, because that would take a second. Request: source, variables of each
text, limits. Answer: the texts, or what went wrong.
"""

import json
import resource
import sys
import time
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks text that a model is trained on; here it only writes its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own form

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers gives templates, without date and randomness."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    del made.globals["lipsum"], made.filters["random"]
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    return made


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the texts that a template writes, or why there are none."""
    try:
        template = environment().from_string(request["source"])
        return {"texts": [_render(template, v, request["max_chars"]) for v in request["variables"]]}
    except Exception as error:  # untrusted program: what it raises is its answer
        return {"fault": f"{type(error).__name__}: {str(error)[:200]}"}


def _render(template: Any, variables: dict[str, Any], most: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ValueError(f"it writes more than {most} characters")
    return "".join(pieces)


def _limit(which: int, most: int) -> None:
    _, hard = resource.getrlimit(which)
    bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (bound, bound))


if __name__ == "__main__":
    asked = json.loads(sys.stdin.readline())
    _limit(resource.RLIMIT_AS, asked["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + asked["cpu_s"])
    sys.stdout.write(json.dumps(answer(asked)) + "\n")
