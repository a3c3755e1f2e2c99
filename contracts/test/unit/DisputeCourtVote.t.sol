// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IDisputeCourt, IDisputeCourtEvents} from "../../src/interfaces/IDisputeCourt.sol";
import {CourtTest} from "../CourtTest.sol";

contract DisputeCourtVoteTest is CourtTest {
    address private _juror;
    uint256 private _openedAt;

    function setUp() public override {
        super.setUp();
        _challengeAndDraw(ALICE_FRAUD, ACCEPTED);
        _juror = validators[2];
        _openedAt = block.timestamp;
    }

    function _commit(address juror, bytes32 commitment) private {
        vm.prank(juror);
        court.commitVote(_fraudLeaf, commitment);
    }

    function _commitAll(bool overturn) private {
        for (uint256 i = 2; i < 5; ++i) {
            _commitVote(_fraudLeaf, validators[i], overturn);
        }
    }

    function _reveal(address juror, bool overturn, bytes32 result, bytes32 salt) private {
        vm.prank(juror);
        court.revealVote(_fraudLeaf, overturn, result, salt);
    }

    // -------------------------------------------------------------------- commit

    function testFuzz_commitVote_reverts_withoutACase(bytes32 leaf, bytes32 commitment) public {
        vm.assume(leaf != _fraudLeaf);
        _expectNoOpenCase(leaf, uint8(IDisputeCourt.CaseStatus.None));
        vm.prank(_juror);
        court.commitVote(leaf, commitment);
    }

    function test_commitVote_reverts_whenClosed() public {
        vm.warp(_openedAt + JURY_TIME);
        court.close(_outcomeAt(ALICE_FRAUD));
        _expectNoOpenCase(_fraudLeaf, uint8(IDisputeCourt.CaseStatus.Upheld));
        _commit(_juror, "commitment");
    }

    function test_commitVote_reverts_beforeTheDraw() public {
        _challenge(BOB_ACCEPTED, REJECTED);
        _expectNotJuror(_acceptedLeaf, _juror);
        vm.prank(_juror);
        court.commitVote(_acceptedLeaf, "commitment");
    }

    function testFuzz_commitVote_reverts_whenNotAJuror(address caller, bytes32 commitment) public {
        vm.assume(caller != validators[2] && caller != validators[3] && caller != validators[4]);
        _expectNotJuror(_fraudLeaf, caller);
        _commit(caller, commitment);
    }

    function testFuzz_commitVote_reverts_whenTheJurorSigned(uint256 signer, bytes32 commitment) public {
        signer = bound(signer, 0, 1);
        _expectNotJuror(_fraudLeaf, validators[signer]);
        _commit(validators[signer], commitment);
    }

    function testFuzz_commitVote_reverts_whenTimeIsOver(uint256 waited, bytes32 commitment) public {
        waited = waited % 2 == 0 ? COMMIT_TIME : bound(waited, COMMIT_TIME, 100 days);
        vm.warp(_openedAt + waited);
        _expectPhaseOver(_fraudLeaf, _openedAt + COMMIT_TIME);
        _commit(_juror, commitment);
    }

    function testFuzz_commitVote_reverts_twice(bytes32 first, bytes32 second) public {
        vm.assume(uint256(first) > 1);
        _commit(_juror, first);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _commit(_juror, second);
    }

    /// @dev Zero stands for nothing, one for revealed.
    function testFuzz_commitVote_reverts_whenCommitmentHasAMeaning(uint256 commitment) public {
        _expectVoteMismatch(_fraudLeaf, _juror);
        _commit(_juror, bytes32(commitment % 2));
    }

    function testFuzz_commitVote_records(uint256 waited, bytes32 commitment) public {
        vm.assume(uint256(commitment) > 1);
        vm.warp(_openedAt + bound(waited, 0, COMMIT_TIME - 1));
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.VoteCommitted(_fraudLeaf, _juror, commitment);
        _commit(_juror, commitment);
        assertEq(court.commitmentOf(_fraudLeaf, _juror), commitment, "commitment");
        assertEq(court.caseOf(_fraudLeaf).committed, 1, "count");
    }

    /// @dev Its place on the jury outlasts its seat, so that nobody can pick jurors by unseating others.
    function test_commitVote_works_whenTheJurorLostItsSeat() public {
        vm.prank(address(faults));
        runs.unseatValidator(runId, _juror);
        _commitVote(_fraudLeaf, _juror, true);
        assertEq(court.caseOf(_fraudLeaf).committed, 1, "count");
    }

    // -------------------------------------------------------------------- reveal

    function testFuzz_revealVote_reverts_withoutACase(bytes32 leaf) public {
        vm.assume(leaf != _fraudLeaf);
        _expectNoOpenCase(leaf, uint8(IDisputeCourt.CaseStatus.None));
        vm.prank(_juror);
        court.revealVote(leaf, true, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whileOthersMayCommit(uint256 waited, uint256 committed) public {
        committed = bound(committed, 1, 2);
        for (uint256 i = 0; i < committed; ++i) {
            _commitVote(_fraudLeaf, validators[2 + i], true);
        }
        vm.warp(_openedAt + bound(waited, 0, COMMIT_TIME - 1));
        _expectPhaseOpen(_fraudLeaf, _openedAt + COMMIT_TIME);
        _reveal(_juror, true, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whenTimeIsOver(uint256 waited) public {
        _commitVote(_fraudLeaf, _juror, true);
        waited = waited % 2 == 0 ? JURY_TIME : bound(waited, JURY_TIME, 100 days);
        vm.warp(_openedAt + waited);
        _expectPhaseOver(_fraudLeaf, _openedAt + JURY_TIME);
        _reveal(_juror, true, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whenNothingWasCommitted(address caller, bool overturn) public {
        vm.warp(_openedAt + COMMIT_TIME);
        _expectVoteMismatch(_fraudLeaf, caller);
        _reveal(caller, overturn, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_whenAnythingDiffers(bool overturn, bytes32 other, uint256 which) public {
        vm.assume(other != RESULT && other != SALT);
        which = bound(which, 0, 2);
        _commitVote(_fraudLeaf, _juror, overturn);
        vm.warp(_openedAt + COMMIT_TIME);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _reveal(_juror, which == 0 ? !overturn : overturn, which == 1 ? other : RESULT, which == 2 ? other : SALT);
    }

    /// @dev A copied commitment cannot be opened: its author is in it.
    function testFuzz_revealVote_reverts_whenTheCommitmentWasCopied(bool overturn) public {
        bytes32 commitment = _commitment(_fraudLeaf, _juror, overturn);
        _commit(_juror, commitment);
        _commit(validators[3], commitment);
        vm.warp(_openedAt + COMMIT_TIME);
        _reveal(_juror, overturn, RESULT, SALT);
        _expectVoteMismatch(_fraudLeaf, validators[3]);
        _reveal(validators[3], overturn, RESULT, SALT);
    }

    /// @dev Nor can the same juror reuse one of another case.
    function testFuzz_revealVote_reverts_whenTheCommitmentIsOfAnotherCase(bool overturn) public {
        _commit(_juror, _commitment(_acceptedLeaf, _juror, overturn));
        vm.warp(_openedAt + COMMIT_TIME);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _reveal(_juror, overturn, RESULT, SALT);
    }

    function testFuzz_revealVote_reverts_twice(bool overturn) public {
        _commitAll(overturn);
        _reveal(_juror, overturn, RESULT, SALT);
        _expectVoteMismatch(_fraudLeaf, _juror);
        _reveal(_juror, overturn, RESULT, SALT);
    }

    function testFuzz_revealVote_counts(bool overturn, bytes32 result, bytes32 salt, uint256 waited) public {
        vm.warp(_openedAt + COMMIT_TIME - 1);
        _commit(_juror, keccak256(abi.encode(_fraudLeaf, _juror, overturn, result, salt)));
        vm.warp(_openedAt + bound(waited, COMMIT_TIME, JURY_TIME - 1));
        vm.expectEmit(address(court));
        emit IDisputeCourtEvents.VoteRevealed(_fraudLeaf, _juror, overturn, result);
        _reveal(_juror, overturn, result, salt);
        IDisputeCourt.Case memory voted = court.caseOf(_fraudLeaf);
        assertEq(voted.votesToOverturn, overturn ? 1 : 0, "for");
        assertEq(voted.votesToUphold, overturn ? 0 : 1, "against");
        assertEq(court.commitmentOf(_fraudLeaf, _juror), bytes32(uint256(1)), "revealed");
    }

    /// @dev Once all have committed there is nothing to wait for.
    function testFuzz_revealVote_works_asSoonAsAllCommitted(uint256 waited) public {
        vm.warp(_openedAt + bound(waited, 0, COMMIT_TIME - 1));
        _commitAll(true);
        _reveal(_juror, true, RESULT, SALT);
        assertEq(court.caseOf(_fraudLeaf).votesToOverturn, 1, "counted");
    }

    /// @dev A commitment after a reveal would be made in the knowledge of another's vote.
    function test_commitVote_reverts_onceAllCommitted() public {
        _commitAll(true);
        _reveal(_juror, true, RESULT, SALT);
        for (uint256 i = 2; i < 5; ++i) {
            _expectVoteMismatch(_fraudLeaf, validators[i]);
            _commit(validators[i], "another vote");
        }
    }
}
