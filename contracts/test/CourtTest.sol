// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors} from "../src/interfaces/IDisputeCourt.sol";
import {BaseTest} from "./BaseTest.sol";

/// @title A batch with a fraud of Alice and an acceptance of Bob, and the steps of a case about either
/// @dev Validators 0 and 1 sign it, so that 2, 3 and 4 are the only ones that may be jurors.
abstract contract CourtTest is BaseTest {
    uint256 internal constant ALICE_FRAUD = 0;
    uint256 internal constant BOB_ACCEPTED = 1;

    bytes32 internal constant RESULT = keccak256("what the juror recomputed");
    bytes32 internal constant SALT = keccak256("salt");

    bytes[] internal _records;
    uint64 internal _batchId;
    bytes32 internal _fraudLeaf;
    bytes32 internal _acceptedLeaf;

    function setUp() public virtual override {
        super.setUp();
        _startRun(WALLET / 2);
        _judge(_two(_record(alice, 1, 0, FRAUD), _record(bob, 1, 0, ACCEPTED)), QUORUM);
    }

    /// @dev Makes these the records that cases are about, signed by the first `signers` validators.
    function _judge(bytes[] memory records, uint256 signers) internal {
        _records = records;
        _batchId = _commit(records.length);
        _post(_batchId, records, signers);
        _fraudLeaf = _leaf(_batchId, 0, records[0]);
        if (records.length > 1) _acceptedLeaf = _leaf(_batchId, 1, records[1]);
    }

    function _outcomeAt(uint256 position) internal view returns (IContributionLedger.OutcomeProof memory) {
        return _prove(_batchId, _records, position);
    }

    // -------------------------------------------------------------------- a case

    function _challengeBy(address who, uint256 position, uint8 claimed) internal {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        vm.prank(who);
        court.challenge(outcome, claimed);
    }

    function _challenge(uint256 position, uint8 claimed) internal {
        _challengeBy(challenger, position, claimed);
    }

    function _passDraw() internal {
        vm.roll(block.number + DRAW_DELAY + 1);
    }

    function _drawJury(uint256 position) internal {
        _passDraw();
        court.drawJury(_outcomeAt(position));
    }

    function _challengeAndDraw(uint256 position, uint8 claimed) internal {
        _challenge(position, claimed);
        _drawJury(position);
    }

    function _commitment(bytes32 leaf, address juror, bool overturn) internal pure returns (bytes32) {
        return keccak256(abi.encode(leaf, juror, overturn, RESULT, SALT));
    }

    function _commitVote(bytes32 leaf, address juror, bool overturn) internal {
        vm.prank(juror);
        court.commitVote(leaf, _commitment(leaf, juror, overturn));
    }

    function _revealVote(bytes32 leaf, address juror, bool overturn) internal {
        vm.prank(juror);
        court.revealVote(leaf, overturn, RESULT, SALT);
    }

    /// @dev All three jurors commit and reveal.
    function _voteAll(bytes32 leaf, bool second, bool third, bool fourth) internal {
        bool[3] memory votes = [second, third, fourth];
        for (uint256 i = 0; i < 3; ++i) {
            _commitVote(leaf, validators[2 + i], votes[i]);
        }
        for (uint256 i = 0; i < 3; ++i) {
            _revealVote(leaf, validators[2 + i], votes[i]);
        }
    }

    /// @dev A case from challenge to close that the challenger wins or loses by three votes.
    function _decide(uint256 position, uint8 claimed, bool overturn) internal {
        _challengeAndDraw(position, claimed);
        _voteAll(_leaf(_batchId, position, _records[position]), overturn, overturn, overturn);
        court.close(_outcomeAt(position));
    }

    function _execute(address worker, uint256 position, uint256 nodeKey) internal returns (uint256) {
        IContributionLedger.Submission memory submission = _submission(worker, 1, 0);
        return ledger.executeFraud(_outcomeAt(position), submission, _signSubmission(submission, nodeKey));
    }

    function _offence(uint256 position) internal view returns (bytes32) {
        return ledger.standingOf(_outcomeAt(position)).offence;
    }

    // -------------------------------------------------------------- expectations

    function _expectNoOpenCase(bytes32 leaf, uint8 status) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoOpenCase.selector, leaf, status));
    }

    function _expectPhaseOver(bytes32 leaf, uint256 endedAt) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtPhaseOver.selector, leaf, endedAt));
    }

    function _expectPhaseOpen(bytes32 leaf, uint256 until) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtPhaseOpen.selector, leaf, until));
    }

    function _expectNotJuror(bytes32 leaf, address caller) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, leaf, caller));
    }

    function _expectVoteMismatch(bytes32 leaf, address juror) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtVoteMismatch.selector, leaf, juror));
    }
}
