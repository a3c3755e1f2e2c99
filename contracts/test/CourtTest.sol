// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {IDisputeCourtErrors} from "../src/interfaces/IDisputeCourt.sol";
import {BaseTest} from "./BaseTest.sol";

/// @title A batch with a fraud of Alice and an acceptance of Bob, and the steps of a case about either
/// @dev Validators 0 and 1 sign it. Three of the five jurors are drawn.
abstract contract CourtTest is BaseTest {
    uint256 internal constant ALICE_FRAUD = 0;
    uint256 internal constant BOB_ACCEPTED = 1;

    /// @dev FILE_UNAVAILABLE: rejected, because nobody showed the file.
    uint16 internal constant NOT_SHOWN = 0x030f;

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
        _batchId = _commitRecords(records);
        _post(_batchId, records, signers);
        _fraudLeaf = _leaf(_batchId, 0, records[0]);
        if (records.length > 1) _acceptedLeaf = _leaf(_batchId, 1, records[1]);
    }

    function _outcomeAt(uint256 position) internal view returns (IContributionLedger.OutcomeProof memory) {
        return _prove(_batchId, _records, position);
    }

    /// @dev The submission at a position, and its node's signature: Alice's at 0, Bob's at 1.
    function _evidence(uint256 position)
        internal
        view
        returns (IContributionLedger.Submission memory submission, bytes memory signature)
    {
        submission = _submission(position == ALICE_FRAUD ? alice : bob, 1, 0);
        signature = _signSubmission(submission, position == ALICE_FRAUD ? aliceNodeKey : bobNodeKey);
    }

    // -------------------------------------------------------------------- a case

    function _announce(address who, bytes32 leaf, uint16 ruling) internal {
        vm.prank(who);
        court.announce(keccak256(abi.encode(who, leaf, ruling, SALT)));
        vm.roll(block.number + 1);
    }

    function _claimAnnounced(address who, uint256 position, uint16 ruling) internal {
        (IContributionLedger.Submission memory submission, bytes memory signature) = _evidence(position);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        vm.prank(who);
        court.claim(outcome, _held(outcome, submission, signature), ruling, SALT, _noSources());
    }

    function _claimBy(address who, uint256 position, uint16 ruling) internal {
        _announce(who, _leaf(_batchId, position, _records[position]), ruling);
        _claimAnnounced(who, position, ruling);
    }

    function _challenge(uint256 position, uint16 ruling) internal {
        _claimBy(challenger, position, ruling);
    }

    function _passDraw() internal {
        vm.roll(block.number + DRAW_DELAY + 1);
    }

    function _draw(bytes32 caseId) internal {
        _passDraw();
        court.draw(caseId);
    }

    function _challengeAndDraw(uint256 position, uint16 ruling) internal {
        _challenge(position, ruling);
        _draw(_leaf(_batchId, position, _records[position]));
    }

    /// @dev The drawn jurors, in the order of the bench.
    function _panel(bytes32 caseId) internal view returns (address[] memory panel) {
        panel = new address[](JURY_SIZE);
        uint256 found;
        for (uint256 i = 0; i < 5; ++i) {
            if (court.voteOf(caseId, jurors[i]) != 0) panel[found++] = jurors[i];
        }
        assertEq(found, JURY_SIZE, "jurors drawn");
    }

    function _commitment(bytes32 caseId, address juror, uint16 ruling) internal pure returns (bytes32) {
        return keccak256(abi.encode(caseId, juror, ruling, RESULT, SALT));
    }

    function _commitVote(bytes32 caseId, address juror, uint16 ruling) internal {
        vm.prank(juror);
        court.commitVote(caseId, _commitment(caseId, juror, ruling));
    }

    function _revealVote(bytes32 caseId, address juror, uint16 ruling) internal {
        vm.prank(juror);
        court.revealVote(caseId, ruling, RESULT, SALT);
    }

    /// @dev All three jurors commit and reveal.
    function _voteAll(bytes32 caseId, uint16 first, uint16 second, uint16 third) internal {
        address[] memory panel = _panel(caseId);
        uint16[3] memory votes = [first, second, third];
        for (uint256 i = 0; i < 3; ++i) {
            _commitVote(caseId, panel[i], votes[i]);
        }
        for (uint256 i = 0; i < 3; ++i) {
            _revealVote(caseId, panel[i], votes[i]);
        }
    }

    /// @dev A case from announcement to end in which all jurors vote for one ruling.
    function _decide(uint256 position, uint16 claimed, uint16 ruling) internal {
        _challengeAndDraw(position, claimed);
        _voteAll(_leaf(_batchId, position, _records[position]), ruling, ruling, ruling);
        court.settle(_outcomeAt(position));
    }

    function _execute(address worker, uint256 position, uint256 nodeKey) internal returns (uint256) {
        IContributionLedger.Submission memory submission = _submission(worker, 1, 0);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        return ledger.executeFraud(outcome, _held(outcome, submission, _signSubmission(submission, nodeKey)));
    }

    function _reporterOf(bytes32 leaf) internal view returns (address reporter) {
        (,, reporter) = court.subjectOf(leaf);
    }

    // -------------------------------------------------------------- expectations

    function _expectNoOpenCase(bytes32 caseId, uint8 status) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNoOpenCase.selector, caseId, status));
    }

    function _expectPhaseOver(bytes32 caseId, uint256 endedAt) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtPhaseOver.selector, caseId, endedAt));
    }

    function _expectPhaseOpen(bytes32 caseId, uint256 until) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtPhaseOpen.selector, caseId, until));
    }

    function _expectNotJuror(bytes32 caseId, address caller) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtNotJuror.selector, caseId, caller));
    }

    function _expectVoteMismatch(bytes32 caseId, address juror) internal {
        vm.expectRevert(abi.encodeWithSelector(IDisputeCourtErrors.CourtVoteMismatch.selector, caseId, juror));
    }
}
