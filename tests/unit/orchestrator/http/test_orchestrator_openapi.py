"""The OpenAPI document, its examples, the client's methods and live answers agree."""

import inspect
import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest
from orchestrator_bench import Bench
from orchestrator_fakes import RUN

from muster.api import OrchestratorApi
from muster.api.routes import JSON, ROUTES, Route, RouteAnswer
from muster.orchestrator.http.app import create_app
from muster.protocol.ids import Hash32
from muster.protocol.messages import Submission

pytestmark = pytest.mark.sqlite_only

COMMITTED = Path(__file__).parents[4] / "docs" / "reference" / "openapi.json"
EXAMPLES = [(r, a) for r in ROUTES for a in r.answers if a.kind is not None]


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


@pytest.fixture
def document(bench: Bench) -> dict[str, Any]:
    return bench.app.openapi()


def conforms(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


async def test_every_route_of_the_application_is_in_the_table(document: dict[str, Any]) -> None:
    found = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert found == {named(route) for route in ROUTES}, "describe it in muster.api.routes"


@pytest.mark.parametrize("route", ROUTES, ids=named)
def test_every_route_has_a_method_of_the_client_or_a_reason(route: Route) -> None:
    assert (route.client is None) == bool(route.without_client)
    if route.client is not None:
        assert inspect.isfunction(getattr(OrchestratorApi, route.client))


def test_client_has_no_method_without_a_route() -> None:
    public = {
        name
        for name, value in vars(OrchestratorApi).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    routed = {route.client for route in ROUTES if route.client}
    # `download` is `document`, part by part.
    assert public - routed == {"close", "download", "connects_to", "is_inside"}


@pytest.mark.parametrize(
    ("route", "answer"),
    [(route, answer) for route, answer in EXAMPLES if route.client is not None],
    ids=lambda x: named(x) if isinstance(x, Route) else "",
)
def test_client_returns_what_the_route_answers(route: Route, answer: RouteAnswer) -> None:
    assert route.client is not None
    assert answer.kind is not None
    returned = get_type_hints(getattr(OrchestratorApi, route.client))["return"]
    unpacked = {
        "called": dict[int, int],
        "submit": Hash32,
        "post_outcomes": type(None),
        "post_checking": type(None),
        "post_fingerprints": type(None),
        "post_check_report": type(None),
    }
    expected = unpacked.get(route.client, answer.kind)
    assert expected in (returned, *get_args(returned))


async def test_every_example_is_what_its_schema_and_model_say(document: dict[str, Any]) -> None:
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        for answer in route.answers:
            if answer.media is None:
                continue
            content = operation["responses"][str(answer.status)]["content"][answer.media]
            assert content["example"] is not None
            conforms(document, content["schema"], content["example"])
            if answer.kind is not None:
                model = answer.kind.model_validate(content["example"])
                assert model.model_dump(mode="json") == content["example"]
        assert all("example" in parameter for parameter in operation["parameters"])
        if "requestBody" in operation:
            (content,) = operation["requestBody"]["content"].values()
            conforms(document, content["schema"], content["example"])
            if route.body is not None:
                route.body.model_validate(content["example"])


async def test_example_of_a_submission_header_parses(document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/submissions/{run_id}/{step}/{index}"]["put"]
    (header,) = [p for p in operation["parameters"] if p["name"] == "x-muster-submission"]
    assert Submission.from_json(json.loads(header["example"])).units == 2048


async def test_damaged_example_is_refused_by_schema_and_model(document: dict[str, Any]) -> None:
    for route, answer in EXAMPLES:
        assert answer.kind is not None
        required = [n for n, f in answer.kind.model_fields.items() if f.is_required()]
        for name in required:
            damaged = {k: v for k, v in answer.example.items() if k != name}
            content = document["paths"][route.path][route.method.lower()]["responses"]
            schema = content[str(answer.status)]["content"][JSON]["schema"]
            with pytest.raises(jsonschema.ValidationError):
                conforms(document, schema, damaged)
            with pytest.raises(ValueError, match=name):
                answer.kind.model_validate(damaged)


async def test_live_answers_are_what_the_document_says(bench: Bench) -> None:
    document, answered = bench.app.openapi(), set[str]()
    send = OrchestratorApi._once

    async def check(api: OrchestratorApi, call: Any) -> Any:
        answer = await send(api, call)
        (route,) = [r for r in ROUTES if r.method == call.method and matches(r.path, call.path)]
        answered.add(named(route))
        described = document["paths"][route.path][route.method.lower()]["responses"]
        content = described[str(answer.status)].get("content")
        if content is None:
            assert answer.body == b""
        elif JSON in content:
            conforms(document, content[JSON]["schema"], json.loads(answer.body))
        else:
            assert answer.headers["content-type"].split(";")[0] in content
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrchestratorApi, "_once", check)
        await play(bench)
    elsewhere = {named(route) for route in ROUTES if route.client in (None, "events", *CHECKING)}
    assert answered == {named(route) for route in ROUTES} - elsewhere


CHECKING = ("post_checking", "post_fingerprints", "post_check_report")
"""Routes that need validators' recomputed values, see test_orchestrator_checking.py."""


def matches(template: str, path: str) -> bool:
    wanted, given = template.split("/"), path.split("?")[0].split("/")
    return len(wanted) == len(given) and all(
        part == other or part.startswith("{") for part, other in zip(wanted, given, strict=True)
    )


async def play(bench: Bench) -> None:
    """Call every route once."""
    submission = await bench.upload(0)
    await bench.commit()
    async with bench.node() as node, bench.validator() as validator:
        await node.run_info(RUN)
        await node.network()
        await node.document(bench.network.recipe.hash())
        await node.heartbeat(RUN, policy_version=None, state="idle", software="test")
        assert list(await validator.called()) == [1]
        await validator.batch(1)
        assert await validator.file(submission.file_hash) == b"a file"
        await node.status()
        await node.watched()
        await node.checking(1)
    await bench.judge(1, [submission])
    await bench.record()
    async with bench.api(bench.network.keys.trainer) as trainer:
        await trainer.submission_state(submission.file_hash)
        await trainer.post_metrics(1, {"reward": 0.5})
        [root] = bench.services.projection.run.checkpoints.values()
        await trainer.post_evaluation(RUN, root.version, root.manifest_root, {"eval_reward": 0.5})


async def test_committed_document_is_the_live_one(document: dict[str, Any]) -> None:
    assert json.loads(COMMITTED.read_text()) == document, "run `make docs`"


async def test_document_is_made_once(bench: Bench) -> None:
    app = create_app(bench.services)
    assert app.openapi() is app.openapi()
