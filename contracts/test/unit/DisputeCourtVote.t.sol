// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IDisputeCourt, IDisputeCourtErrors, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {CourtTest} from "../CourtTest.sol";

/// @dev Committing to votes, revealing them, and counting them.
contract DisputeCourtVoteTest is CourtTest {
    address[] private _jurors;
    address private _juror;
    uint256 private _openedAt;

    function setUp() public override {
        super.setUp();
        _challengeAndDraw(ALICE_FRAUD, ACCEPT);
        _jurors = _panel(_fraudLeaf);
        _juror = _jurors[0];
        _openedAt = block.timestamp;
    }

    function _commit(address juror, bytes32 commitment) private {
        vm.prank(juror);
        court.commitVote(_fraudLeaf, commitment);
    }

    function _commitAll(uint16 ruling) private {
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            _commitVote(_fraudLeaf, _jurors[i], ruling);
        }
    }

    function _reveal(address juror, uint16 ruling, bytes32 result, bytes32 salt) private {
        vm.prank(juror);
        court.revealVote(_fraudLeaf, ruling, result, salt);
    }

    /// @dev A ruling that a juror may vote: nothing seen, or one of the verdicts with any reason.
    function _validRuling(uint16 seed) private pure returns (uint16) {
        uint16 verdict = (seed >> 8) % 5;
        return verdict == 0 ? UNSEEN : verdict << 8 | (seed & 0xff);
    }

    function _hash(uint256 seed) private pure returns (bytes32) {
        return bytes32(bound(seed, uint256(type(uint32).max) + 1, type(uint256).max));
    }

    // -------------------------------------------------------------------- commit

    function testFuzz_commitVote_reverts_withoutACase(bytes32 caseId, bytes32 commitment) public {
        vm.assume(caseId != _fraudLeaf);
        _expectNoOpenCase(caseId, uint8(IDisputeCourt.CaseStatus.None));
        vm.prank(_juror);
        court.commitVote(caseId, commitment);
    }

    function test_commitVote_reverts_whenClosed() public {
        vm.warp(_openedAt + JURY_TIME);
        court.settle(_outcomeAt(ALICE_FRAUD));
        _expectNoOpenCase(_fraudLeaf, uint8(IDisputeCourt.CaseStatus.Upheld));
        _commit(_juror, RESULT);
    }

    function test_commitVote_reverts_beforeTheDraw() public {
        _challenge(BOB_ACCEPTED, REJECT);
        _expectNotJuror(_acceptedLeaf, _juror);
        vm.prank(_juror);
        court.commitVote(_acceptedLeaf, RESULT);
    }

    function testFuzz_commitVote_reverts_forWhoWasNotDrawn(address caller, bytes32 commitment, bool fromTheBench)
        public
    {
        if (fromTheBench) caller = jurors[uint256(commitment) % 5];
        vm.assume(court.voteOf(_fraudLeaf, caller) == 0);
        _expectNotJuror(_fraudLeaf, caller);
        _commit(caller, commitment);
    }

    function testFuzz_commitVote_reverts_whenTimeIsOver(uint256 waited, bytes32 commitment) public {
        waited = waited % 2 == 0 ? COMMIT_TIME : bound(waited, COMMIT_TIME, 100 days);
        vm.warp(_openedAt + waited);
        _expectPhaseOver(_fraudLeaf, _openedAt + COMMIT_TIME);
        _commit(_juror, commitment);
    }

    function testFuzz_commitVote_reverts_twice(uint256 first, bytes32 second) public {
        _commit(_juror, _hash(first));
        _expectNotJuror(_fraudLeaf, _juror);
        _commit(_juror, second);
    }

    /// @dev Small words stand for something else: nothing, drawn, revealed, paid.
    function testFuzz_commitVote_reverts_whenTheCommitmentIsNoHash(uint32 commitment, bool small) public {
        uint256 word = small ? commitment % 4 : commitment;
        _expectVoteMismatch(_fraudLeaf, _juror);
        _commit(_juror, bytes32(word));
    }

    function test_commitVote_takesTheSmallestHash() public {
        _commit(_juror, bytes32(uint256(type(uint32).max) + 1));
        assertEq(court.caseOf(_fraudLeaf).committed, 1, "count");
    }

    function testFuzz_commitVote_records(uint256 waited, uint256 seed) public {
        bytes32 commitment = _hash(seed);
        vm.warp(_openedAt + (waited % 2 == 0 ? COMMIT_TIME - 1 : bound(waited, 0, COMMIT_TIME - 1)));
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.VoteCommitted(_fraudLeaf, _juror, commitment);
        _commit(_juror, commitment);
        assertEq(court.voteOf(_fraudLeaf, _juror), commitment, "commitment");
        assertEq(court.caseOf(_fraudLeaf).committed, 1, "count");
    }

    /// @dev Its place on the jury outlasts its place on the bench, so that nobody gets rid of jurors.
    function test_commitVote_works_whenTheJurorLeftTheBench() public {
        vm.prank(_juror);
        jury.leave();
        _commitVote(_fraudLeaf, _juror, ACCEPT);
        assertEq(court.caseOf(_fraudLeaf).committed, 1, "count");
    }

    // -------------------------------------------------------------------- reveal

    function testFuzz_revealVote_reverts_withoutACase(bytes32 caseId) public {
        vm.assume(caseId != _fraudLeaf);
        _expectNoOpenCase(caseId, uint8(IDisputeCourt.CaseStatus.None));
        vm.prank(_juror);
        court.revealVote(caseId, ACCEPT, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whileOthersMayCommit(uint256 waited, uint256 committed) public {
        committed = bound(committed, 1, 2);
        for (uint256 i = 0; i < committed; ++i) {
            _commitVote(_fraudLeaf, _jurors[i], ACCEPT);
        }
        vm.warp(_openedAt + (waited % 2 == 0 ? COMMIT_TIME - 1 : bound(waited, 0, COMMIT_TIME - 1)));
        _expectPhaseOpen(_fraudLeaf, _openedAt + COMMIT_TIME);
        _reveal(_juror, ACCEPT, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whenTimeIsOver(uint256 waited) public {
        _commitVote(_fraudLeaf, _juror, ACCEPT);
        waited = waited % 2 == 0 ? JURY_TIME : bound(waited, JURY_TIME, 100 days);
        vm.warp(_openedAt + waited);
        _expectPhaseOver(_fraudLeaf, _openedAt + JURY_TIME);
        _reveal(_juror, ACCEPT, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whenNothingWasCommitted(address caller, bool drawn, uint16 ruling) public {
        if (drawn) caller = _juror;
        vm.warp(_openedAt + COMMIT_TIME);
        _expectVoteMismatch(_fraudLeaf, caller);
        _reveal(caller, ruling, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whenAnythingDiffers(uint16 seed, uint16 ruling, bytes32 other, uint256 which)
        public
    {
        uint16 voted = _validRuling(seed);
        vm.assume(other != RESULT && other != SALT && ruling != voted);
        which = bound(which, 0, 2);
        _commitVote(_fraudLeaf, _juror, voted);
        vm.warp(_openedAt + COMMIT_TIME);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _reveal(_juror, which == 0 ? ruling : voted, which == 1 ? other : RESULT, which == 2 ? other : SALT);
    }

    /// @dev A copied commitment cannot be opened: its author is in it.
    function testFuzz_revealVote_reverts_whenTheCommitmentWasCopied(uint16 seed) public {
        uint16 ruling = _validRuling(seed);
        bytes32 commitment = _commitment(_fraudLeaf, _juror, ruling);
        _commit(_juror, commitment);
        _commit(_jurors[1], commitment);
        vm.warp(_openedAt + COMMIT_TIME);
        _reveal(_juror, ruling, RESULT, SALT);
        _expectVoteMismatch(_fraudLeaf, _jurors[1]);
        _reveal(_jurors[1], ruling, RESULT, SALT);
    }

    /// @dev Nor can the same juror reuse one of another case.
    function testFuzz_revealVote_reverts_whenTheCommitmentIsOfAnotherCase(uint16 seed) public {
        uint16 ruling = _validRuling(seed);
        _commit(_juror, _commitment(_acceptedLeaf, _juror, ruling));
        vm.warp(_openedAt + COMMIT_TIME);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _reveal(_juror, ruling, RESULT, SALT);
    }

    /// @dev A verdict that there is none of, or a reason without a verdict.
    function testFuzz_revealVote_reverts_whenTheRulingIsNone(uint8 verdict, uint8 reason) public {
        verdict = verdict <= FRAUD ? 0 : verdict;
        uint16 ruling = uint16(verdict) << 8 | reason;
        vm.assume(ruling != UNSEEN);
        _commitVote(_fraudLeaf, _juror, ruling);
        vm.warp(_openedAt + COMMIT_TIME);
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtInvalidRuling.selector, STATISTICAL, ruling));
        _reveal(_juror, ruling, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_twice(uint16 seed) public {
        uint16 ruling = _validRuling(seed);
        _commitAll(ruling);
        _reveal(_juror, ruling, RESULT, SALT);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _reveal(_juror, ruling, RESULT, SALT);
    }

    function testFuzz_revealVote_counts(uint16 seed, bytes32 result, bytes32 salt, uint256 waited) public {
        uint16 ruling = _validRuling(seed);
        vm.warp(_openedAt + COMMIT_TIME - 1);
        _commit(_juror, keccak256(abi.encode(_fraudLeaf, _juror, ruling, result, salt)));
        vm.warp(_openedAt + bound(waited, COMMIT_TIME, JURY_TIME - 1));
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.VoteRevealed(_fraudLeaf, _juror, ruling, result);
        _reveal(_juror, ruling, result, salt);
        IDisputeCourt.Case memory voted = court.caseOf(_fraudLeaf);
        assertEq(voted.revealed, 1, "revealed");
        assertEq(voted.leading, ruling, "leads");
        assertEq(voted.leadingVotes, 1, "by one vote");
        assertFalse(voted.tied, "alone");
        assertEq(court.voteOf(_fraudLeaf, _juror), bytes32(uint256(ruling) << 8 | 2), "kept");
    }

    /// @dev Once all have committed there is nothing to wait for.
    function testFuzz_revealVote_works_asSoonAsAllCommitted(uint256 waited) public {
        vm.warp(_openedAt + bound(waited, 0, COMMIT_TIME - 1));
        _commitAll(ACCEPT);
        _reveal(_juror, ACCEPT, RESULT, SALT);
        assertEq(court.caseOf(_fraudLeaf).revealed, 1, "counted");
    }

    /// @dev A commitment after a reveal would be made in the knowledge of another's vote.
    function test_commitVote_reverts_onceAllCommitted() public {
        _commitAll(ACCEPT);
        _reveal(_juror, ACCEPT, RESULT, SALT);
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            _expectNotJuror(_fraudLeaf, _jurors[i]);
            _commit(_jurors[i], "another vote");
        }
    }

    // --------------------------------------------------------------------- count

    /// @dev Any three votes, in any order: as counted the slow way after each.
    function testFuzz_revealVote_findsTheLeadingRuling(uint256 seed) public {
        uint16[8] memory choices = [UNSEEN, ACCEPT, REJECT, STATISTICAL, NOT_SHOWN, REJECT + 1, STATISTICAL + 1, EXACT];
        uint16[] memory votes = new uint16[](JURY_SIZE);
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            votes[i] = choices[(seed >> (3 * i)) & 7];
            _commitVote(_fraudLeaf, _jurors[i], votes[i]);
        }
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            _reveal(_jurors[i], votes[i], RESULT, SALT);
            _assertCounted(votes, i + 1);
        }
    }

    function _assertCounted(uint16[] memory votes, uint256 revealed) private view {
        IDisputeCourt.Case memory voted = court.caseOf(_fraudLeaf);
        uint256 most;
        uint256 holders;
        for (uint256 i = 0; i < revealed; ++i) {
            uint256 count = _votesFor(votes, revealed, votes[i]);
            if (count > most) (most, holders) = (count, 0);
            // Each kind of ruling is met once for each of its votes.
            if (count == most) ++holders;
        }
        assertEq(voted.leadingVotes, most, "most votes");
        assertEq(_votesFor(votes, revealed, voted.leading), most, "of a ruling that has them");
        assertEq(voted.tied, holders > most, "and whether another has as many");
    }

    function _votesFor(uint16[] memory votes, uint256 revealed, uint16 ruling) private pure returns (uint256 count) {
        for (uint256 i = 0; i < revealed; ++i) {
            if (_isSameKind(votes[i], ruling)) ++count;
        }
    }

    /// @dev Jurors that agree on what follows lead together, whatever their reasons.
    function test_revealVote_countsReasonsTogether() public {
        _assertLeads([uint16(0x043c), 0x043d, 0x043e], 0x043c, 3);
    }

    /// @dev The reason is that of the vote by which a verdict took the lead.
    function test_revealVote_keepsTheReasonThatTookTheLead() public {
        _assertLeads([ACCEPT, REJECT, REJECT + 1], REJECT + 1, 2);
    }

    function test_revealVote_keepsTheReasonOfWhoLedAllTheTime() public {
        _assertLeads([REJECT, ACCEPT, REJECT + 1], REJECT, 2);
    }

    function test_revealVote_countsTogetherWhoSawNothing() public {
        _assertLeads([UNSEEN, ACCEPT, NOT_SHOWN], UNSEEN, 2);
    }

    /// @dev An exact fraud costs the worker its registration, another does not.
    function test_revealVote_countsExactFraudsApart() public {
        _voteAll(_fraudLeaf, 0x043b, 0x043c, ACCEPT);
        assertTrue(court.caseOf(_fraudLeaf).tied, "one vote each");
    }

    function _assertLeads(uint16[3] memory votes, uint16 ruling, uint256 count) private {
        _voteAll(_fraudLeaf, votes[0], votes[1], votes[2]);
        IDisputeCourt.Case memory voted = court.caseOf(_fraudLeaf);
        assertEq(voted.leading, ruling, "leads");
        assertEq(voted.leadingVotes, count, "votes");
        assertFalse(voted.tied, "alone");
    }
}
