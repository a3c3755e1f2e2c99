"""The court for jurors and claimants, with the interface that the programs expect."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from muster.chain import Batch, CourtTerms, OutcomeProof
from muster.chain.structs import CommittedWork
from muster.lab.simulator.connection import ChainConnection
from muster.lab.simulator.model import words
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import Fixed, Name
from muster.lab.simulator.translation import SealedVote, claimed_of
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import BenchPlace, Ruling, draw_jury, jury_seed, vote_commitment
from muster.protocol.messages import Submission


def court_terms(fixed: Fixed) -> CourtTerms:
    """Return a deployment's parameters of disputes."""
    return CourtTerms(
        bond=fixed.bond,
        juror_fee=fixed.juror_fee,
        draw_delay=fixed.draw_delay,
        jury_size=fixed.jury_size,
        commit_time=fixed.commit_time,
        reveal_time=fixed.reveal_time,
        wrong_verdict_ppm=fixed.wrong_verdict_ppm,
        absence_ppm=fixed.absence_ppm,
    )


class CourtConnection(ChainConnection):
    """A connection whose account claims or votes."""

    @property
    def court(self) -> CourtConnection:
        """The court of disputes."""
        return self

    async def announce(self, outcome: OutcomeProof, ruling: Ruling, salt: int) -> object:
        """Announce a claim about an outcome."""
        caller, number = str(self.account), ruling.number

        def call(state: Network) -> None:
            leaf = state.standing(self._proof(state, outcome)).leaf
            state.announce(caller, ("announcement", caller, leaf, number, salt))

        return await self._send("announce", call)

    async def claim(
        self,
        outcome: OutcomeProof,
        work: CommittedWork,
        ruling: Ruling,
        salt: int,
    ) -> object:
        """Put the caller's bond, which it approves first, on a ruling that it announced."""
        caller, bond = str(self.account), self._chain.fixed.bond
        claimed, signer, held = self._shown(outcome, work)
        self._chain.words.node_signatures[signer, claimed] = work.node_signature

        def call(state: Network) -> None:
            state.allowances[caller, "DisputeCourt"] = bond
            proof = self._proof(state, outcome)
            state.claim_ruling(caller, proof, claimed, signer, ruling.number, salt, held)

        return await self._send("claim_ruling", call)

    async def draw(self, case_id: Hash32) -> object:
        """Draw a case's jury."""

        def draw(
            places: Sequence[words.Place],
            _name: Name,
            draw_block: int,
            opened_at: int,
            size: int,
            excluded: Collection[str],
        ) -> list[str]:
            bench = [BenchPlace(Address(p.juror), p.joined_at, p.left_at) for p in places]
            drawn = draw_jury(
                bench,
                opened_at=opened_at,
                size=size,
                seed=jury_seed(self._chain.blocks[draw_block].hash, case_id),
                excluded={Address(name) for name in excluded},
            )
            return [str(juror) for juror in drawn]

        return await self._send("draw", lambda state: state.draw(self._case(state, case_id), draw))

    async def commit_vote(self, case_id: Hash32, commitment: Hash32) -> object:
        """Commit to a vote."""
        caller, vote = str(self.account), SealedVote(commitment)
        return await self._send(
            "commit_vote",
            lambda state: state.commit_vote(caller, self._case(state, case_id), vote),
        )

    async def reveal_vote(
        self, case_id: Hash32, ruling: int, result_hash: Hash32, salt: Hash32
    ) -> object:
        """Reveal a vote."""
        caller = Address(str(self.account))
        commitment = vote_commitment(case_id, caller, Ruling.of(ruling), result_hash, salt)
        vote = SealedVote(commitment, ruling, result_hash)
        return await self._send(
            "reveal_vote",
            lambda state: state.reveal_vote(str(caller), self._case(state, case_id), vote),
        )

    async def settle(self, outcome: OutcomeProof) -> object:
        """Close a case."""
        return await self._send("settle", lambda state: state.settle(self._proof(state, outcome)))

    async def settle_summoned(self, batch: Batch, submission: Submission) -> object:
        """Close the case about a batch that its run left unjudged."""
        claimed = claimed_of(submission)
        return await self._send(
            "settle",
            lambda state: state.settle_summoned(self._header(state, batch), claimed),
        )

    async def collect_fee(self, case_id: Hash32, juror: Address) -> object:
        """Pay a juror."""
        return await self._send(
            "collect_fee",
            lambda state: state.collect_fee(self._case(state, case_id), str(juror)),
        )

    async def fine_signer(self, outcome: OutcomeProof, validator: Address) -> object:
        """Fine a validator that signed an outcome that a jury overturned."""
        return await self._send(
            "fine",
            lambda state: state.fine_signer(self._proof(state, outcome), str(validator)),
        )

    async def fine_absent_juror(self, case_id: Hash32, juror: Address) -> object:
        """Fine a juror that revealed no vote."""
        return await self._send(
            "fine",
            lambda state: state.fine_absent_juror(self._case(state, case_id), str(juror)),
        )
