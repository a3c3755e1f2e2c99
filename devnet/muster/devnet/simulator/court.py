"""The court as jurors and challengers reach it: fits where the programs have their connection."""

from __future__ import annotations

from collections.abc import Sequence

from muster.chain import CourtTerms, OutcomeProof
from muster.devnet.simulator.connection import ChainConnection
from muster.devnet.simulator.contracts import SealedVote
from muster.devnet.simulator.model.network import Network
from muster.devnet.simulator.model.words import Fixed, Name
from muster.protocol.ids import Address, Hash32
from muster.protocol.jury import draw_jury, jury_seed, vote_commitment
from muster.protocol.messages import Verdict


def court_terms(fixed: Fixed) -> CourtTerms:
    """Return what a deployment fixes about disputes."""
    return CourtTerms(
        challenge_bond=fixed.challenge_bond,
        draw_delay=fixed.draw_delay,
        jury_size=fixed.jury_size,
        commit_time=fixed.commit_time,
        reveal_time=fixed.reveal_time,
    )


class CourtConnection(ChainConnection):
    """A connection whose account challenges or votes."""

    @property
    def court(self) -> CourtConnection:
        """The court of disputes."""
        return self

    async def challenge(self, outcome: OutcomeProof, claimed: Verdict) -> object:
        """Open a case with the caller's bond, which it approves first."""
        caller, bond = str(self.account), self._chain.fixed.challenge_bond

        def call(state: Network) -> None:
            state.allowances[caller, "DisputeCourt"] = bond
            state.challenge(caller, self._proof(state, outcome), int(claimed))

        return await self._send("challenge", call)

    async def draw_jury(self, outcome: OutcomeProof) -> object:
        """Draw a case's jury."""

        def draw(weights: Sequence[int], size: int, leaf: Name, draw_block: int) -> list[int]:
            beacon = self._chain.blocks[draw_block].hash
            return draw_jury(weights, size, jury_seed(beacon, self._chain.words.said(leaf)))

        return await self._send(
            "draw_jury", lambda state: state.draw_jury(self._proof(state, outcome), draw)
        )

    async def commit_vote(self, leaf: Hash32, commitment: Hash32) -> object:
        """Commit to a vote."""
        caller, vote = str(self.account), SealedVote(commitment)
        return await self._send(
            "commit_vote",
            lambda state: state.commit_vote(caller, self._case(state, leaf), vote),
        )

    async def reveal_vote(
        self, leaf: Hash32, overturn: bool, result_hash: Hash32, salt: Hash32
    ) -> object:
        """Reveal a vote."""
        caller = Address(str(self.account))
        commitment = vote_commitment(leaf, caller, overturn, result_hash, salt)
        vote = SealedVote(commitment, overturn, result_hash)
        return await self._send(
            "reveal_vote",
            lambda state: state.reveal_vote(caller, self._case(state, leaf), vote),
        )

    async def close(self, outcome: OutcomeProof) -> object:
        """Close a case."""
        return await self._send(
            "close_case", lambda state: state.close_case(self._proof(state, outcome))
        )
