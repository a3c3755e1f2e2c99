// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {VmSafe} from "forge-std/Vm.sol";

import {IContributionLedger} from "../src/interfaces/IContributionLedger.sol";
import {IWorkerRegistry} from "../src/interfaces/IWorkerRegistry.sol";
import {BaseTest} from "./BaseTest.sol";
import {CourtTest} from "./CourtTest.sol";

/// @title What the main operations cost as transactions, on a network that is already in use
/// @dev Isolation runs each top-level call as a transaction of its own: cold storage, 21,000 base and calldata
///      included. The figures are written to contracts/gas/operations.json.
/// forge-config: default.isolate = true
contract GasTest is CourtTest {
    uint256 private constant BATCH = 64;

    function setUp() public override {
        BaseTest.setUp();
        _startRun(WALLET / 2);
        _settleOneOfEach();
    }

    // ---------------------------------------------------------------- the stage

    /// @dev Nothing measured below is the first of its kind on the network: a slot is paid, a fraud finalised, a case and
    ///      a summons are settled, and the court holds the bond of another case and fees.
    function _settleOneOfEach() private {
        bytes[] memory records = new bytes[](4);
        for (uint32 i = 0; i < 4; ++i) {
            records[i] = _record(bob, 1, i, i == 1 ? FRAUD : ACCEPTED);
        }
        _records = records;
        _batchId = _commitAndPost(records);
        uint64 direct = _directly(bob, bobNodeKey, 1001);
        _remember(direct, _submissionLeaf(_submission(bob, 1, 1001)), 1, 1000);
        IContributionLedger.Submission memory submission = _submission(bob, 1, 1);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(1);
        ledger.executeFraud(outcome, _held(outcome, submission, _signSubmission(submission, bobNodeKey)));
        _dispute(2, bob, bobNodeKey);
        bytes32 leaf = _leafAt(2);
        _draw(leaf);
        _voteAll(leaf, REJECT, REJECT, REJECT);
        court.settle(_outcomeAt(2));
        _dispute(3, bob, bobNodeKey);
        _passChallengeWindow();
        _claim(_batchId, _records, 0, 1);
        ledger.finaliseFraud(_outcomeAt(1));
        _summonAndSettle(direct);
        _passChallengeWindow();
    }

    /// @dev `count` accepted records of Alice, posted; cases and proofs below are about them.
    function _postAcceptedOfAlice(uint256 count) private {
        _records = _accepted(count);
        _batchId = _commitAndPost(_records);
    }

    /// @dev The same, but for a fraud at the last position.
    function _postFraudOfAlice() private {
        _records = _accepted(BATCH);
        _records[BATCH - 1] = _record(alice, 1, uint32(BATCH - 1), FRAUD);
        _batchId = _commitAndPost(_records);
    }

    function _leafAt(uint256 position) private view returns (bytes32) {
        return _leaf(_batchId, position, _records[position]);
    }

    /// @dev A claim that an accepted record, whose index is its position, is to be rejected.
    function _dispute(uint256 position, address worker, uint256 nodeKey) private {
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(position);
        IContributionLedger.Submission memory submission = _submission(worker, 1, uint32(position));
        bytes memory signature = _signSubmission(submission, nodeKey);
        string[] memory sources = _oneSource();
        _announce(challenger, _leafAt(position), REJECT);
        vm.prank(challenger);
        court.claim(outcome, _held(outcome, submission, signature), REJECT, SALT, sources);
    }

    function _oneSource() private pure returns (string[] memory sources) {
        sources = new string[](1);
        sources[0] = "https://worker-17.example.org/files/";
    }

    /// @dev A worker's direct submission.
    function _directly(address worker, uint256 nodeKey, uint32 index) private returns (uint64 batchId) {
        IContributionLedger.Submission memory submission = _submission(worker, 1, index);
        IContributionLedger.LeasedWork memory work = _work(submission, nodeKey, block.timestamp);
        string[] memory sources = _oneSource();
        vm.prank(worker);
        batchId = ledger.submitDirect(work, sources);
    }

    /// @dev Judges of the network accept the direct submission of Bob.
    function _summonAndSettle(uint64 batchId) private {
        IContributionLedger.Submission memory submission = _submission(bob, 1, 1001);
        string[] memory sources = _oneSource();
        vm.prank(bob);
        court.summon(batches[batchId], submission, sources);
        bytes32 caseId = court.summonsOf(batchId);
        _draw(caseId);
        _voteAll(caseId, ACCEPT, ACCEPT, ACCEPT);
        court.settleSummoned(batches[batchId], submission);
    }

    /// @dev Records what the last call cost, and fails above `limit`.
    function _lastGas(string memory name, uint256 limit) private returns (uint256 used) {
        VmSafe.Gas memory gas = vm.lastCallGas();
        used = gas.gasTotalUsed;
        vm.snapshotValue("operations", name, used);
        assertLe(used, limit, name);
    }

    // ------------------------------------------------------------------ joining

    function test_gas_onboard() public {
        (address carol, uint256 carolKey) = makeAddrAndKey("carol");
        (address carolNode, uint256 carolNodeKey) = makeAddrAndKey("carol's node");
        vm.prank(deployer);
        token.transfer(carol, WALLET);
        IWorkerRegistry.NodeConsent memory consent = _nodeConsent(carol, carolNode, carolNodeKey, block.timestamp);
        IWorkerRegistry.Permit memory permit;
        permit.deadline = block.timestamp;
        (permit.v, permit.r, permit.s) = _signPermit(carol, carolKey, address(vault), REQUIRED_STAKE, block.timestamp);
        vm.prank(carol);
        workers.join(runId, 1, REQUIRED_STAKE, consent, permit);
        _lastGas("onboard", 260_000);
    }

    /// @dev A worker that has a number and a node key already.
    function test_gas_joinSecondRun() public {
        uint64 second = _createRun();
        vm.prank(alice);
        workers.join(second, 1, REQUIRED_STAKE, _noConsent(), _noPermit());
        _lastGas("joinSecondRun", 150_000);
    }

    function _noConsent() private pure returns (IWorkerRegistry.NodeConsent memory) {}

    /// @dev The sixth seat of a run.
    function test_gas_takeSeat() public {
        vm.prank(owner);
        runs.invite(runId, stranger, true);
        vm.prank(stranger);
        runs.takeSeat(runId, 1, REQUIRED_VALIDATOR_STAKE);
        _lastGas("takeSeat", 260_000);
    }

    /// @dev The sixth place of the bench.
    function test_gas_joinBench() public {
        vm.prank(stranger);
        jury.join(REQUIRED_JUROR_STAKE);
        _lastGas("joinBench", 170_000);
    }

    function test_gas_requestUnbond_and_withdraw() public {
        _deposit(runId, validators[0], 1 ether);
        vm.prank(validators[0]);
        vault.requestUnbond(runId, 1 ether);
        _lastGas("requestUnbond", 75_000);
        vm.warp(block.timestamp + UNBONDING_PERIOD);
        vm.prank(validators[0]);
        vault.withdraw(runId);
        _lastGas("withdraw", 60_000);
    }

    /// @dev Whose stake falls below the requirement loses its seat at once.
    function test_gas_requestUnbond_thatCostsASeat() public {
        vm.prank(validators[0]);
        vault.requestUnbond(runId, 1 ether);
        _lastGas("requestUnbond_of_a_seat", 95_000);
    }

    // ------------------------------------------------------------------ batches

    function test_gas_commitBatch() public {
        vm.prank(orchestrator);
        ledger.commitBatch(runId, keccak256("submissions"), uint32(BATCH), uint64(1000 * BATCH));
        _lastGas("commitBatch", 85_000);
    }

    function test_gas_postOutcomes_64_records_2_signatures() public {
        _postAccepted(_commit(BATCH), 2);
        _lastGas("postOutcomes_64_records_2_signatures", 178_500);
    }

    /// @dev 2 % above the limit of the ledger that had no appeal.
    function test_gas_postOutcomes_64_records_3_signatures() public {
        _postAccepted(_commit(BATCH), 3);
        _lastGas("postOutcomes_64_records_3_signatures", 190_740);
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

    // --------------------------------------------------- what nobody judged

    function test_gas_submitDirect() public {
        _directly(alice, aliceNodeKey, 2000);
        _lastGas("submitDirect", 250_000);
    }

    /// @dev One of 64 submissions.
    function test_gas_splitOff() public {
        bytes32[] memory leaves = _workLeaves();
        uint64 batchId = _commitRoot(_batchRoot(leaves), BATCH, 1000 * BATCH);
        IContributionLedger.LeasedWork memory work = _work(_submission(alice, 1, 5), aliceNodeKey, block.timestamp);
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
        bytes32[] memory proof = _batchSiblings(leaves, 5);
        string[] memory sources = _oneSource();
        vm.prank(alice);
        ledger.splitOff(batches[batchId], work, 5, proof, sources);
        _lastGas("splitOff", 250_000);
    }

    function _workLeaves() private view returns (bytes32[] memory leaves) {
        leaves = new bytes32[](BATCH);
        for (uint256 i = 0; i < BATCH; ++i) {
            leaves[i] = _submissionLeaf(_submission(alice, 1, uint32(i)));
        }
    }

    function test_gas_voidBatch() public {
        uint64 batchId = _commit(BATCH);
        vm.warp(block.timestamp + OUTCOME_DEADLINE + APPEAL_TIME);
        ledger.voidBatch(batches[batchId]);
        _lastGas("voidBatch", 70_000);
    }

    function test_gas_summon_and_settleSummoned() public {
        uint64 batchId = _directly(alice, aliceNodeKey, 2000);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 2000);
        _remember(batchId, _submissionLeaf(submission), 1, 1000);
        vm.warp(block.timestamp + OUTCOME_DEADLINE);
        string[] memory sources = _oneSource();
        vm.prank(alice);
        court.summon(batches[batchId], submission, sources);
        _lastGas("summon", 170_000);
        bytes32 caseId = court.summonsOf(batchId);
        _draw(caseId);
        _voteAll(caseId, ACCEPT, ACCEPT, ACCEPT);
        court.settleSummoned(batches[batchId], submission);
        _lastGas("settleSummoned", 160_000);
    }

    // -------------------------------------------------------------------- fraud

    function test_gas_executeFraud() public {
        _postFraudOfAlice();
        _executeLast();
        _lastGas("executeFraud", 140_000);
    }

    function test_gas_finaliseFraud() public {
        _postFraudOfAlice();
        _executeLast();
        _passChallengeWindow();
        ledger.finaliseFraud(_outcomeAt(BATCH - 1));
        // 6,000 of it ask whether a pause of slashing prolonged the window.
        _lastGas("finaliseFraud", 105_000);
    }

    function _executeLast() private {
        IContributionLedger.Submission memory submission = _submission(alice, 1, uint32(BATCH - 1));
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(BATCH - 1);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        ledger.executeFraud(outcome, _held(outcome, submission, signature));
    }

    function test_gas_pauseSlashing() public {
        _pauseSlashing();
        _lastGas("pauseSlashing", 45_000);
    }

    // -------------------------------------------------------------------- claim

    // Of what one slot costs, 64,300 are the chain's price for what a claim does, whoever writes it: 21,000 for the
    // transaction, 7,300 for its calldata, 7,800 for three other contracts, 4,200 for the batch and the worker, 20,000
    // for four words written and 4,000 for two events. The first slot of 256 pays 17,100 more for a fresh word.

    function test_gas_claim_first_slot() public {
        _postAcceptedOfAlice(BATCH);
        _passChallengeWindow();
        _claim(_batchId, _records, 0, 1);
        _lastGas("claim_first_slot", 97_000);
    }

    function test_gas_claim_later_slot() public {
        _postAcceptedOfAlice(BATCH);
        _passChallengeWindow();
        _claim(_batchId, _records, 0, 1);
        _claim(_batchId, _records, 1, 2);
        _lastGas("claim_later_slot", 80_000);
    }

    function test_gas_claim_16_slots() public {
        _postAcceptedOfAlice(BATCH);
        _passChallengeWindow();
        uint256 before = vm.snapshotState();
        _claim(_batchId, _records, 0, 1);
        uint256 one = vm.lastCallGas().gasTotalUsed;
        vm.revertToState(before);
        _claim(_batchId, _records, 0, 16);
        uint256 further = (_lastGas("claim_16_slots", 200_000) - one) / 15;
        vm.snapshotValue("operations", "claim_further_slot", further);
        assertLe(further, 20_000, "each further slot");
    }

    // -------------------------------------------------------------------- court

    function test_gas_case() public {
        _postAcceptedOfAlice(BATCH);
        _dispute(0, alice, aliceNodeKey);
        _lastGas("claimCase", 290_000);
        bytes32 leaf = _leafAt(0);
        _draw(leaf);
        _lastGas("draw", 250_000);
        address[] memory panel = _panel(leaf);
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            _commitVote(leaf, panel[i], REJECT);
            _lastGas(i == 0 ? "commitVote" : "commitVote_later", 40_000);
        }
        for (uint256 i = 0; i < JURY_SIZE; ++i) {
            _revealVote(leaf, panel[i], REJECT);
            _lastGas(i == 0 ? "revealVote" : "revealVote_later", 65_000);
        }
        court.settle(_outcomeAt(0));
        _lastGas("settle", 190_000);
        court.collectFee(leaf, panel[0]);
        _lastGas("collectFee", 75_000);
    }

    /// @dev The dearest draw: all seats of the run are taken, by accounts that are on the bench, too, and fewer jurors may
    ///      sit than a jury has, so that all tries are used up.
    function test_gas_draw_ofFullRun_withTwoJurors() public {
        for (uint256 i = 5; i < 88; ++i) {
            _seatAndBench(makeAddr(string.concat("validator ", vm.toString(i))));
        }
        for (uint256 i = 0; i < 3; ++i) {
            vm.prank(jurors[i]);
            jury.leave();
        }
        vm.warp(block.timestamp + 1);
        _postAcceptedOfAlice(BATCH);
        _dispute(0, alice, aliceNodeKey);
        _draw(_leafAt(0));
        _lastGas("draw_dearest", 10_000_000);
        assertEq(court.caseOf(_leafAt(0)).jurors, 2, "jurors");
    }

    function _seatAndBench(address account) private {
        _enrich(account);
        vm.prank(owner);
        runs.invite(runId, account, true);
        vm.startPrank(account);
        runs.takeSeat(runId, 1, REQUIRED_VALIDATOR_STAKE);
        jury.join(REQUIRED_JUROR_STAKE);
        vm.stopPrank();
    }

    function test_gas_announce() public {
        _announce(challenger, "leaf", REJECT);
        _lastGas("announce", 50_000);
    }

    /// @dev A later claim of a case adds no case.
    function test_gas_claimOpenCase() public {
        _postAcceptedOfAlice(BATCH);
        _dispute(0, alice, aliceNodeKey);
        IContributionLedger.OutcomeProof memory outcome = _outcomeAt(0);
        IContributionLedger.Submission memory submission = _submission(alice, 1, 0);
        bytes memory signature = _signSubmission(submission, aliceNodeKey);
        string[] memory sources = _oneSource();
        _announce(stranger, _leafAt(0), EXACT);
        vm.prank(stranger);
        court.claim(outcome, _held(outcome, submission, signature), EXACT, SALT, sources);
        _lastGas("claimOpenCase", 190_000);
    }

    function test_gas_fineSigner() public {
        _postAcceptedOfAlice(BATCH);
        _dispute(0, alice, aliceNodeKey);
        bytes32 leaf = _leafAt(0);
        _draw(leaf);
        _voteAll(leaf, REJECT, REJECT, REJECT);
        court.settle(_outcomeAt(0));
        court.fineSigner(_outcomeAt(0), validators[0]);
        _lastGas("fineSigner", 190_000);
    }
}
