"""Translation between the model of the contracts and the chain: events, submissions and records.

The model's names become real addresses, its files real hashes, and its symbolic values (roots,
leaves, signatures) are computed.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from muster.chain import ZERO_ADDRESS, RunConfig
from muster.chain.abi import CONTRACTS, contract_abi
from muster.chain.structs import CommittedWork, Offence, SlashSubject
from muster.lab.simulator.model import work
from muster.lab.simulator.model.words import NO_OFFENCE, NOBODY
from muster.protocol import messages
from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.jury import summons_of
from muster.protocol.merkle import batch_proof, batch_root, merkle_root
from muster.protocol.messages import OutcomeRecord, Reason, Verdict


@cache
def emitter_of() -> dict[str, str]:
    """Return which contract emits which event."""
    return {event.name: name for name in reversed(CONTRACTS) for event in contract_abi(name).events}


class Ranks(dict[str, int]):
    """Orders accounts as their addresses are ordered."""

    def __missing__(self, address: str) -> int:
        return int(address, 16)


class SealedVote:
    """A vote in the model's form: two are equal if their commitments are."""

    def __init__(self, commitment: Hash32, ruling: int = 0, result: Hash32 | None = None):
        self.commitment = commitment
        self._fields = {3: ruling, 4: result}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SealedVote) and other.commitment == self.commitment

    def __hash__(self) -> int:
        return hash(self.commitment)

    def __getitem__(self, place: int) -> Any:
        return self._fields[place]


class Words:
    """Translates the model's values to the chain's."""

    def __init__(self, configs: dict[int, RunConfig]) -> None:
        self.configs = configs
        self.roots: dict[int, Hash32] = {}
        """Root over submissions, by batch."""
        self.signatures: dict[int, bytes] = {}
        """Joined signatures of outcomes, by batch."""
        self.node_signatures: dict[tuple[str, work.Submission], bytes] = {}
        """Signatures that came with claims."""

    def args(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Return an event's arguments as its decoder would."""
        said = {key.rstrip("_"): self.said(value) for key, value in args.items()}
        if name == "RunCreated":
            said["config"] = self.configs[args["run_id"]]
        elif name == "BatchCommitted":
            self.roots[args["batch_id"]] = said["root"]
        elif name in ("OutcomesPosted", "BatchWithheld"):
            said["signatures"] = self.signatures.get(args["batch_id"], b"")
        return said

    def said(self, value: Any) -> Any:
        """Return a value of the model in the chain's form."""
        if isinstance(value, str):
            return {NO_OFFENCE: Hash32(bytes(32)), NOBODY: ZERO_ADDRESS}.get(value, Address(value))
        if isinstance(value, work.Submission):
            return submission_of(value)
        if isinstance(value, SealedVote):
            return value.commitment
        if not isinstance(value, tuple) or not value or not isinstance(value[0], str):
            return value
        if value[0].startswith("0x"):
            return tuple(Address(name) for name in value)
        say: Callable[..., Any] | None = getattr(self, "_" + value[0], None)
        return say(*value[1:]) if say else value

    def _submissions(self, works: Sequence[Any]) -> Hash32:
        return batch_root([submission_of(each).leaf() for each in works])

    def _records(self, records: Sequence[Any]) -> bytes:
        return b"".join(record_of(record).to_bytes() for record in records)

    def _outcomes(self, batch: int, records: Sequence[Any]) -> Hash32:
        return merkle_root([self._outcome(batch, n, r) for n, r in enumerate(records)])

    def _outcome(self, batch: int, position: int, record: Any) -> Hash32:
        return record_of(record).leaf(batch, position)

    def _escrow(self, run: int, owner: str, offence: int, tag: int) -> Hash32:
        return keccak(abi_words(run, address_bytes(Address(owner)), offence, tag))

    def _verdict(self, run: int, owner: str, offence: int, *rest: int) -> SlashSubject:
        return SlashSubject(RunId(run), Address(owner), Offence.of(offence), *rest)

    def _summons(self, batch: int) -> Hash32:
        return summons_of(batch)

    def _announcement(self, claimant: str, leaf: Any, ruling: int, salt: int) -> Hash32:
        who = address_bytes(Address(claimant))
        return keccak(abi_words(who, self.said(leaf), ruling, self._number(salt)))

    def _committed(
        self, claimed: work.Submission, signer: str | None, siblings: Any
    ) -> CommittedWork:
        signature = self.node_signatures.get((signer, claimed), b"") if signer else b""
        return CommittedWork(submission_of(claimed), signature, self._siblings_of(siblings))

    @staticmethod
    def _siblings_of(siblings: Any) -> tuple[Hash32, ...]:
        if siblings is None or siblings[2] is None:
            return ()
        leaves = [submission_of(each).leaf() for each in siblings[1][1]]
        return tuple(batch_proof(leaves, siblings[2]))

    def _nothing(self) -> bytes:
        return b""

    def _sources(self) -> tuple[str, ...]:
        return ()

    def _number(self, number: int) -> Hash32:
        return Hash32(number.to_bytes(32, "big"))

    def _manifest(self, manifest: str) -> Hash32:
        return Hash32(bytes.fromhex(manifest))

    def _result(self, result: Hash32) -> Hash32:
        return result

    def _signatures(self, *_: Any) -> bytes:
        return b""


def submission_of(claimed: work.Submission) -> messages.Submission:
    """Return a submission of the model's as it is signed."""
    return messages.Submission(
        run_id=RunId(claimed.run),
        worker=Address(claimed.worker),
        step=Step(claimed.step),
        index=claimed.index,
        policy_version=PolicyVersion(claimed.version),
        file_hash=claimed.file,
        rollouts=claimed.rollouts,
        units=claimed.units,
    )


def claimed_of(submission: messages.Submission) -> work.Submission:
    """Return a signed submission in the model's words."""
    s = submission
    return work.Submission(
        *(int(s.run_id), str(s.worker), int(s.step), s.index),
        *(int(s.policy_version), s.file_hash, s.rollouts, s.units),
    )


def record_of(record: work.Record) -> OutcomeRecord:
    """Return a record of the model's as it is packed."""
    number, step, index, version, file, rollouts, units, verdict, reason = record
    return OutcomeRecord(
        *(number, Step(step), index, PolicyVersion(version), file, rollouts, units),
        *(Verdict(verdict), Reason(reason)),
    )


def judged_of(record: OutcomeRecord) -> work.Record:
    """Return a packed record in the model's words."""
    r = record
    return work.Record(
        *(int(r.worker_id), int(r.step), r.index, int(r.policy_version), r.file_hash),
        *(r.rollouts, r.units, int(r.verdict), int(r.reason)),
    )
