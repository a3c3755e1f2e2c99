"""Why a version is believed: its root is on a chain, its trainer signed it, or both.

Knows neither the chain's client nor HTTP: a caller that reads the chain passes a `Trust`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from muster.protocol.eip712 import Domain, digest, recover, sign
from muster.protocol.errors import EncodingError, PolicyUnavailable, SignatureError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, to_address
from muster.protocol.messages import Checkpoint
from muster.shardcast.manifest import Manifest

STANDALONE_DOMAIN = Domain(0, to_address(bytes(20)))
"""EIP-712 domain of versions without a chain, from `muster shardcast publish`."""


@dataclass(frozen=True, slots=True)
class TrustedRoot:
    """The requirements on a version."""

    manifest_root: Hash32 | None
    """Keccak-256 that the manifest must have; None if the signature alone decides."""
    trainer: Address | None
    """The account that must have signed it; None if any may, because the root alone decides."""
    domain: Domain
    """The signature's EIP-712 domain: RunRegistry's, or the standalone one."""


Trust = Callable[[RunId, PolicyVersion], Awaitable[TrustedRoot | None]]
"""Returns the requirements on a version; None when there is no such version."""


def check_signature(
    run_id: RunId, version: PolicyVersion, root: Hash32, signature: bytes, trusted: TrustedRoot
) -> None:
    """Raise SignatureError unless the trainer signed this root; without one, anybody."""
    checkpoint = Checkpoint(run_id, version, root)
    signer = recover(digest(trusted.domain, checkpoint.struct_hash()), signature)
    if trusted.trainer not in (None, signer):
        raise SignatureError(f"the checkpoint is signed by {signer}, not by the trainer")


def parse_published(data: bytes, run_id: RunId, version: PolicyVersion) -> Manifest:
    """Return the manifest whose root is on chain; raises PolicyUnavailable when it is unfit.

    Then no relay is at fault: the trainer published it.
    """
    try:
        manifest = Manifest.from_bytes(data)
    except EncodingError as error:
        raise PolicyUnavailable(f"the published manifest is malformed: {error}") from error
    if (manifest.run_id, manifest.version) != (run_id, version):
        raise PolicyUnavailable(
            f"the manifest published as run {run_id} version {version} says "
            f"run {manifest.run_id} version {manifest.version}"
        )
    return manifest


def sign_root(
    key: bytes,
    run_id: RunId,
    version: PolicyVersion,
    root: Hash32,
    *,
    domain: Domain = STANDALONE_DOMAIN,
) -> bytes:
    """Return the signature that `check_signature` demands."""
    return sign(digest(domain, Checkpoint(run_id, version, root).struct_hash()), key)


def trust_signer(signer: Address) -> Trust:
    """Return a Trust that accepts every version signed by this address, without a chain."""

    async def trust(_run_id: RunId, _version: PolicyVersion) -> TrustedRoot | None:
        return TrustedRoot(None, signer, STANDALONE_DOMAIN)

    return trust
