"""The OpenAPI document: FastAPI's own, completed from `muster.api.routes`.

Bodies are read against limits and signatures before they are parsed, so FastAPI sees neither them
nor the headers of signed requests; both are added here, with examples and the one form of errors.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from muster.api.answers import (
    EXAMPLE_ACCOUNT,
    EXAMPLE_HASH,
    EXAMPLE_SIGNATURE,
    BatchEntry,
    ErrorAnswer,
)
from muster.api.routes import JSON, PARAMETERS, ROUTES, Route, RouteAnswer, example_of
from muster.api.signing import (
    ADDRESS_HEADER,
    BODY_HASH_HEADER,
    ISSUED_AT_HEADER,
    NONCE_HEADER,
    SIGNATURE_HEADER,
    SUBMISSION_HEADER,
    SUBMISSION_SIGNATURE_HEADER,
)
from muster.protocol.encoding import canonical_json

_SCHEMAS = "#/components/schemas/"
_SUBMISSION = example_of(BatchEntry)["submission"]
_SIGNED = (
    (ADDRESS_HEADER, "The signer.", EXAMPLE_ACCOUNT),
    (NONCE_HEADER, "32 random bytes, used once.", EXAMPLE_HASH),
    (ISSUED_AT_HEADER, "Unix seconds of the signer's clock.", "1763800400"),
    (BODY_HASH_HEADER, "SHA-256 of the body.", EXAMPLE_HASH),
    (SIGNATURE_HEADER, "EIP-712 `ApiRequest`.", EXAMPLE_SIGNATURE),
)
_CLAIM = (
    (SUBMISSION_HEADER, "The submission, canonical JSON.", canonical_json(_SUBMISSION).decode()),
    (SUBMISSION_SIGNATURE_HEADER, "EIP-712 `Submission`.", EXAMPLE_SIGNATURE),
)


def document_routes(app: FastAPI) -> None:
    """Let an application serve the completed document."""
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(_definitions())
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for route in ROUTES:
            _complete(document["paths"][route.path][route.method.lower()], route)
        app.openapi_schema = document
    return app.openapi_schema


def _definitions() -> dict[str, Any]:
    bodies = [(route.body, "validation") for route in ROUTES if route.body]
    answers = [(a.kind, "serialization") for r in ROUTES for a in r.answers if a.kind]
    models: Any = [*bodies, *answers, (ErrorAnswer, "serialization")]
    _, schema = models_json_schema(models, ref_template=_SCHEMAS + "{model}")
    definitions: dict[str, Any] = schema["$defs"]
    return definitions


def _complete(operation: dict[str, Any], route: Route) -> None:
    for parameter in operation.get("parameters", ()):
        parameter["example"] = PARAMETERS[parameter["name"]]
    headers = () if route.signer == "nobody" else _SIGNED + (_CLAIM if route.body_media else ())
    operation["parameters"] = operation.get("parameters", []) + [
        {
            "name": name,
            "in": "header",
            "required": True,
            "description": description,
            "schema": {"type": "string"},
            "example": example,
        }
        for name, description, example in headers
    ]
    if route.signer != "nobody":
        operation["description"] = f"{operation.get('description', '')}\n\nSigned: {route.signer}."
    if route.body is not None or route.body_media is not None:
        operation["requestBody"] = _body(route)
    operation["responses"] = {str(a.status): _answer(a) for a in route.answers}
    operation["responses"]["default"] = {
        "description": "Why the request was not answered.",
        "content": {JSON: {"schema": _reference(ErrorAnswer), "example": example_of(ErrorAnswer)}},
    }


def _body(route: Route) -> dict[str, Any]:
    schema = _reference(route.body) if route.body else {"type": "string", "format": "binary"}
    media = route.body_media or JSON
    return {"required": True, "content": {media: {"schema": schema, "example": route.body_example}}}


def _answer(answer: RouteAnswer) -> dict[str, Any]:
    described: dict[str, Any] = {"description": _DESCRIPTIONS.get(answer.status, "The answer.")}
    if answer.media is not None:
        schema = {"type": "object"} if answer.media == JSON else {"type": "string"}
        if answer.kind is not None:
            schema = _reference(answer.kind)
        described["content"] = {answer.media: {"schema": schema, "example": answer.example}}
    return described


def _reference(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS + kind.__name__}


_DESCRIPTIONS = {
    202: "Stored.",
    204: "No content; for a lease: no work now, see `retry-after`.",
    206: "The requested range.",
    307: "URL of the file, valid for some minutes.",
}
