"""The document that describes a run's network: an orchestrator signs it, `join` reads it.

It comes from a stranger. This module checks only its form and its signer; the reader must compare
it with the chain (`muster.client.cli.network`).
"""

import ipaddress
import socket
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from muster.api.answers import MAX_RELAYS, SignedNetwork
from muster.protocol.documents import first_fault
from muster.protocol.eip712 import Domain, digest, recover, sign
from muster.protocol.encoding import canonical_json, keccak
from muster.protocol.errors import ApiError, SignatureError
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import NetworkDocument

MAX_URL_CHARS = 2048
MAX_ENDPOINTS = 16


def url_fault(url: str, schemes: tuple[str, ...] = ("http", "https")) -> str | None:
    """Return why a stranger's URL must not be used; None if it may be."""
    try:
        parts = urlsplit(url)
        is_place = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "is no URL"
    if not is_place:
        return f"is no URL of {', '.join(schemes)}"
    if parts.username is not None or parts.password is not None:
        return "holds a name or a password"
    if not url.isascii() or not url.isprintable() or " " in url or "," in url:
        return "holds characters that a URL cannot have"
    return None


def is_private(url: str) -> bool:
    """Return whether a URL leads to this machine or its network, judged by its text alone."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        # Parsed as by connecting programs: 127.1 and 2130706433 are this machine too.
        address = host if ":" in host else socket.inet_ntoa(socket.inet_aton(host))
        return not ipaddress.ip_address(address).is_global
    except (OSError, ValueError):
        return "." not in host or host.endswith((".localhost", ".local"))


def _web(url: str) -> str:
    if url and (fault := url_fault(url)):
        raise ValueError(f"{url[:80]!r} {fault}")
    return url


def _rpc(url: str) -> str:
    if fault := url_fault(url, ("http", "https", "ws", "wss")):
        raise ValueError(f"{url[:80]!r} {fault}")
    return url


Text = Annotated[str, Field(max_length=MAX_URL_CHARS)]
Web = Annotated[Text, AfterValidator(_web)]
Rpc = Annotated[Text, AfterValidator(_rpc)]


class NetworkPage(BaseModel):
    """The description of a run's network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: Annotated[int, Field(ge=1, lt=2**64)]
    chain_id: Annotated[int, Field(ge=1, lt=2**63)]
    """EIP-155 chain id."""
    deploy_block: Annotated[int, Field(ge=0, lt=2**63)]
    """Block of the first deployment."""
    contracts: Annotated[dict[str, str], Field(max_length=64)]
    """Address by contract name."""
    rpc: Annotated[tuple[Rpc, ...], Field(max_length=MAX_ENDPOINTS)] = ()
    """RPC endpoints that anybody may use."""
    orchestrator: Web = ""
    """URL of the run's orchestrator; empty for the server of this document."""
    relays: Annotated[tuple[Web, ...], Field(max_length=MAX_RELAYS)] = ()
    """URLs of relays."""


def sign_network(page: NetworkPage, domain: Domain, key: bytes) -> SignedNetwork:
    """Return a page with the orchestrator's signature over its bytes."""
    text = canonical_json(page.model_dump(mode="json"))
    message = NetworkDocument(RunId(page.run_id), keccak(text))
    signature = sign(digest(domain, message.struct_hash()), key)
    return SignedNetwork(document=text.decode(), signature=signature)


def read_network(signed: SignedNetwork) -> NetworkPage:
    """Return a document's content; raises ApiError when it does not follow docs/protocol.md."""
    try:
        return NetworkPage.model_validate_json(signed.document)
    except ValidationError as error:
        raise ApiError(
            f"the network's document is malformed: {first_fault(error)}",
            status=502,
            code="bad_answer",
            hint="ask the run's owner; nothing was written",
        ) from error


def signer_of(signed: SignedNetwork, page: NetworkPage, domain: Domain) -> Address:
    """Return the signer of a document; raises SignatureError for an invalid signature."""
    message = NetworkDocument(RunId(page.run_id), keccak(signed.document.encode()))
    try:
        return recover(digest(domain, message.struct_hash()), signed.signature)
    except UnicodeEncodeError as error:
        raise SignatureError("the document is no text") from error
