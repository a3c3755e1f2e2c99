// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {VmSafe} from "forge-std/Vm.sol";

import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {BaseTest} from "./BaseTest.sol";

/// @title What the main operations cost as transactions, on a network that is already in use
/// @dev Isolation runs each top-level call as a transaction of its own: cold storage, 21,000 base and calldata
///      included. The figures are written to contracts/gas/operations.json.
/// forge-config: default.isolate = true
contract GasTest is BaseTest {
    uint256 private constant BATCH = 64;

    function setUp() public override {
        super.setUp();
        _startRun(WALLET / 2);
        _settleOneOfEach();
    }

    /// @dev Nothing measured below is the first of its kind on the network.
    function _settleOneOfEach() private {
        bytes[] memory records = _two(_record(bob, 1, 0, ACCEPTED), _record(bob, 1, 1, FRAUD));
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.Submission memory submission = _submission(bob, 1, 1);
        ledger.executeFraud(_prove(batchId, records, 1), submission, _signSubmission(submission, bobNodeKey));
        _passChallengeWindow();
        _claim(batchId, records, 0, 1);
        _leaveBondInCourt();
    }

    function _leaveBondInCourt() private {
        bytes[] memory records = _one(_record(bob, 1, 2, ACCEPTED));
        IContributionLedger.OutcomeProof memory outcome = _prove(_commitAndPost(records), records, 0);
        vm.prank(challenger);
        court.challenge(outcome, REJECTED);
    }

    /// @dev `count` accepted records of Alice, but for a fraud at the last position.
    function _recordsWithFraud(uint256 count) private view returns (bytes[] memory records) {
        records = _accepted(count);
        records[count - 1] = _record(alice, 1, uint32(count - 1), FRAUD);
    }

    /// @dev Records what the last call cost, and fails above `limit`.
    function _lastGas(string memory name, uint256 limit) private returns (uint256 used) {
        VmSafe.Gas memory gas = vm.lastCallGas();
        used = gas.gasTotalUsed;
        vm.snapshotValue("operations", name, used);
        assertLe(used, limit, name);
    }

    function test_gas_onboard() public {
        (address carol, uint256 carolKey) = makeAddrAndKey("carol");
        (address carolNode, uint256 carolNodeKey) = makeAddrAndKey("carol's node");
        vm.prank(deployer);
        token.transfer(carol, WALLET);
        uint256 deadline = block.timestamp;
        bytes memory consent = _consent(carol, carolNode, carolNodeKey, deadline);
        (uint8 v, bytes32 r, bytes32 s) = _signPermit(carol, carolKey, address(vault), REQUIRED_STAKE, deadline);
        vm.prank(carol);
        workers.registerWithPermit(REQUIRED_STAKE, carolNode, deadline, consent, deadline, v, r, s);
        _lastGas("onboard", 260_000);
    }

    function test_gas_commitBatch() public {
        vm.prank(orchestrator);
        ledger.commitBatch(runId, keccak256("submissions"), uint32(BATCH), uint64(1000 * BATCH));
        _lastGas("commitBatch", 85_000);
    }

    function test_gas_postOutcomes_64_records_2_signatures() public {
        _postAccepted(_commit(BATCH), 2);
        _lastGas("postOutcomes_64_records_2_signatures", 175_000);
    }

    function test_gas_postOutcomes_64_records_3_signatures() public {
        _postAccepted(_commit(BATCH), 3);
        _lastGas("postOutcomes_64_records_3_signatures", 187_000);
    }

    function _postAccepted(uint64 batchId, uint256 signers) private {
        bytes memory joined = _join(_accepted(BATCH));
        bytes memory signatures = _signOutcomes(batchId, joined, signers);
        ledger.postOutcomes(batches[batchId], joined, signatures);
    }

    /// @dev 250 gas per rollout of 64 submissions with 16 rollouts each.
    function test_gas_commitAndPost_64_records_3_signatures() public {
        vm.prank(orchestrator);
        uint64 batchId = ledger.commitBatch(runId, keccak256("submissions"), uint32(BATCH), uint64(1000 * BATCH));
        uint256 committed = vm.lastCallGas().gasTotalUsed;
        _remember(batchId, keccak256("submissions"), BATCH, 1000 * BATCH);
        _postAccepted(batchId, 3);
        uint256 both = committed + vm.lastCallGas().gasTotalUsed;
        vm.snapshotValue("operations", "per_rollout_1024", both / (BATCH * 16));
        assertLe(both, 250 * BATCH * 16, "both");
    }

    function test_gas_executeFraud() public {
        bytes[] memory records = _recordsWithFraud(BATCH);
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.Submission memory submission = _submission(alice, 1, uint32(BATCH - 1));
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, BATCH - 1);
        ledger.executeFraud(outcome, submission, _signSubmission(submission, aliceNodeKey));
        _lastGas("executeFraud", 120_000);
    }

    function test_gas_pauseSlashing() public {
        _pauseSlashing();
        _lastGas("pauseSlashing", 45_000);
    }

    function test_gas_finaliseFraud() public {
        bytes[] memory records = _recordsWithFraud(BATCH);
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.Submission memory submission = _submission(alice, 1, uint32(BATCH - 1));
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, BATCH - 1);
        ledger.executeFraud(outcome, submission, _signSubmission(submission, aliceNodeKey));
        _passChallengeWindow();
        ledger.finaliseFraud(outcome);
        // 6,000 of it ask whether a pause of slashing prolonged the window.
        _lastGas("finaliseFraud", 102_000);
    }

    // Of what one slot costs, 64,000 are the chain's price for what a claim does, whoever writes it: 21,000 for the
    // transaction, 7,000 for its calldata, 7,800 for three other contracts, 4,200 for the batch and the worker, 20,000
    // for four words written and 4,000 for two events. The first slot of 256 pays 17,100 more for a fresh word.

    function test_gas_claim_first_slot() public {
        bytes[] memory records = _accepted(BATCH);
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        _claim(batchId, records, 0, 1);
        _lastGas("claim_first_slot", 100_000);
    }

    function test_gas_claim_later_slot() public {
        bytes[] memory records = _accepted(BATCH);
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        _claim(batchId, records, 0, 1);
        _claim(batchId, records, 1, 2);
        _lastGas("claim_later_slot", 80_000);
    }

    function test_gas_claim_16_slots() public {
        bytes[] memory records = _accepted(BATCH);
        uint64 batchId = _commitAndPost(records);
        _passChallengeWindow();
        uint256 before = vm.snapshotState();
        _claim(batchId, records, 0, 1);
        uint256 one = vm.lastCallGas().gasTotalUsed;
        vm.revertToState(before);
        _claim(batchId, records, 0, 16);
        uint256 further = (_lastGas("claim_16_slots", 200_000) - one) / 15;
        vm.snapshotValue("operations", "claim_further_slot", further);
        assertLe(further, 20_000, "each further slot");
    }

    function test_gas_challenge() public {
        bytes[] memory records = _accepted(BATCH);
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        vm.prank(challenger);
        court.challenge(outcome, REJECTED);
        _lastGas("challenge", 160_000);
    }

    function test_gas_jury() public {
        bytes[] memory records = _accepted(BATCH);
        uint64 batchId = _commitAndPost(records);
        IContributionLedger.OutcomeProof memory outcome = _prove(batchId, records, 0);
        vm.prank(challenger);
        court.challenge(outcome, REJECTED);
        bytes32 leaf = _leaf(batchId, 0, records[0]);
        vm.roll(block.number + DRAW_DELAY + 1);
        court.drawJury(outcome);
        _lastGas("drawJury", 200_000);
        for (uint256 i = 2; i < 5; ++i) {
            vm.prank(validators[i]);
            court.commitVote(leaf, keccak256(abi.encode(leaf, validators[i], true, bytes32("result"), bytes32("salt"))));
            _lastGas("commitVote", 60_000);
        }
        for (uint256 i = 2; i < 5; ++i) {
            vm.prank(validators[i]);
            court.revealVote(leaf, true, "result", "salt");
            _lastGas("revealVote", 70_000);
        }
        court.close(outcome);
        _lastGas("closeCase", 150_000);
    }

    function test_gas_requestUnbond_and_withdraw() public {
        vm.prank(validators[0]);
        vault.requestUnbond(1 ether);
        _lastGas("requestUnbond", 75_000);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(validators[0]);
        vault.withdraw();
        _lastGas("withdraw", 60_000);
    }
}
