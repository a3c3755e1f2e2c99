// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {ERC20Permit} from "@openzeppelin/contracts/token/ERC20/extensions/ERC20Permit.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";

import {ContributionLedger} from "../src/ContributionLedger.sol";
import {MusterToken} from "../src/MusterToken.sol";
import {NetworkFactory} from "../src/NetworkFactory.sol";
import {WorkerRegistry} from "../src/WorkerRegistry.sol";
import {IContributionLedger, IContributionLedgerErrors} from "../src/interfaces/IContributionLedger.sol";
import {IRunRegistry} from "../src/interfaces/IRunRegistry.sol";
import {IWorkerRegistry} from "../src/interfaces/IWorkerRegistry.sol";
import {OutcomeRecordLib} from "../src/libraries/OutcomeRecordLib.sol";
import {SeedLib} from "../src/libraries/SeedLib.sol";
import {BaseTest} from "./BaseTest.sol";
import {MultiProofs} from "./unit/MultiProof.t.sol";

/// @title The golden vectors of tests/conformance, run against the contracts
/// @dev Contracts are copied to the addresses of the vectors' domains, where Python's signatures must be valid.
contract ConformanceTest is BaseTest {
    /// @dev What the deterministic deployment proxy is on every chain.
    bytes private constant PROXY_CODE =
        hex"7fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffe03601600081602082378035828234f58015156039578182fd5b8082525050506014600cf3";

    string private _seeds;
    string private _eip712;
    string private _batch;
    string private _jury;
    string private _merkle;
    string private _deployment;

    function setUp() public override {
        super.setUp();
        _seeds = vm.readFile("tests/conformance/vectors/seeds.json");
        _eip712 = vm.readFile("tests/conformance/vectors/eip712.json");
        _batch = vm.readFile("tests/conformance/vectors/batch.json");
        _jury = vm.readFile("tests/conformance/vectors/jury.json");
        _merkle = vm.readFile("tests/conformance/vectors/merkle.json");
        _deployment = vm.readFile("tests/conformance/vectors/deployment.json");
        vm.chainId(vm.parseJsonUint(_eip712, ".chain_id"));
    }

    function _at(string memory list, uint256 i, string memory field) private pure returns (string memory) {
        return string.concat(list, "[", vm.toString(i), "].", field);
    }

    function _field(string memory message, string memory name) private pure returns (string memory) {
        return string.concat(".messages.", message, ".fields.", name);
    }

    function _domainOf(string memory contract_) private view returns (address) {
        return vm.parseJsonAddress(_eip712, string.concat(".domains.", contract_, ".address"));
    }

    function _separatorOf(string memory contract_) private view returns (bytes32) {
        return vm.parseJsonBytes32(_eip712, string.concat(".domains.", contract_, ".separator"));
    }

    // -------------------------------------------------------------------- seeds

    function test_seeds() public view {
        for (uint256 i = 0; vm.keyExistsJson(_seeds, string.concat(".cases[", vm.toString(i), "]")); ++i) {
            bytes32 seed = SeedLib.ticketSeed(
                uint64(vm.parseJsonUint(_seeds, _at(".cases", i, "run_id"))),
                vm.parseJsonBytes32(_seeds, _at(".cases", i, "beacon")),
                vm.parseJsonAddress(_seeds, _at(".cases", i, "worker")),
                uint32(vm.parseJsonUint(_seeds, _at(".cases", i, "step"))),
                uint32(vm.parseJsonUint(_seeds, _at(".cases", i, "index")))
            );
            assertEq(seed, vm.parseJsonBytes32(_seeds, _at(".cases", i, "ticket_seed")), "ticket seed");
            _checkDraws(i, seed);
            _checkDerived(i, seed);
            _checkMixture(i, seed);
        }
    }

    function _checkDraws(uint256 i, bytes32 seed) private view {
        string memory draws = _at(".cases", i, "draws");
        for (uint256 d = 0; d < 15; ++d) {
            uint256 drawn = SeedLib.draw(
                seed,
                vm.parseJsonUint(_seeds, _at(draws, d, "purpose")),
                vm.parseJsonUint(_seeds, _at(draws, d, "counter"))
            );
            assertEq(drawn, vm.parseJsonUint(_seeds, _at(draws, d, "value")), "draw");
        }
    }

    function _checkDerived(uint256 i, bytes32 seed) private view {
        uint256[] memory problems = vm.parseJsonUintArray(_seeds, _at(".cases", i, "problem_indices"));
        uint256 size = vm.parseJsonUint(_seeds, _at(".cases", i, "task_set_size"));
        assertEq(SeedLib.problemIndices(seed, problems.length, size), problems, "problems");
        uint256[] memory lengths = vm.parseJsonUintArray(_seeds, _at(".cases", i, "lengths"));
        uint256[] memory targets = vm.parseJsonUintArray(_seeds, _at(".cases", i, "target_lengths"));
        uint256[] memory samples = vm.parseJsonUintArray(_seeds, _at(".cases", i, "sample_seeds"));
        uint256 group = vm.parseJsonUint(_seeds, _at(".cases", i, "samples_per_problem"));
        for (uint256 j = 0; j < problems.length; ++j) {
            assertEq(SeedLib.targetLength(seed, j, lengths), int256(targets[j]), "target length");
            assertEq(SeedLib.sampleSeed(seed, j, j + 1, group), samples[j], "sample seed");
        }
    }

    function _checkMixture(uint256 i, bytes32 seed) private view {
        uint256[] memory weights = vm.parseJsonUintArray(_seeds, _at(".cases", i, "weights"));
        uint256[] memory parts = vm.parseJsonUintArray(_seeds, _at(".cases", i, "parts"));
        for (uint256 j = 0; j < parts.length; ++j) {
            assertEq(SeedLib.partOf(seed, j, weights), parts[j], "part");
        }
        (uint256[] memory starts, uint256[] memory drawn) = _stretches(i, "part_sizes", parts);
        uint256[] memory mixed = vm.parseJsonUintArray(_seeds, _at(".cases", i, "mixed_indices"));
        assertEq(SeedLib.mixedIndices(seed, starts, drawn), mixed, "mixed problems");
        (starts, drawn) = _stretches(i, "small_sizes", parts);
        bytes memory setAside = vm.parseJsonBytes(_seeds, _at(".cases", i, "set_aside"));
        uint256[] memory every = vm.parseJsonUintArray(_seeds, _at(".cases", i, "revisit"));
        uint256[] memory past = vm.parseJsonUintArray(_seeds, _at(".cases", i, "indices_past_the_list"));
        assertEq(SeedLib.indicesPast(seed, starts, drawn, setAside, every), past, "problems past the list");
    }

    /// @dev Returns where the part of each problem starts, and how many problems it has.
    function _stretches(uint256 i, string memory name, uint256[] memory parts)
        private
        view
        returns (uint256[] memory starts, uint256[] memory drawn)
    {
        uint256[] memory sizes = vm.parseJsonUintArray(_seeds, _at(".cases", i, name));
        (starts, drawn) = (new uint256[](parts.length), new uint256[](parts.length));
        for (uint256 j = 0; j < parts.length; ++j) {
            drawn[j] = sizes[parts[j]];
            for (uint256 before = 0; before < parts[j]; ++before) {
                starts[j] += sizes[before];
            }
        }
    }

    // ----------------------------------------------------------------- messages

    function test_domains() public {
        assertEq(_ledgerOfVectors().DOMAIN_SEPARATOR(), _separatorOf("ContributionLedger"), "ledger");
        assertEq(_registryOfVectors().DOMAIN_SEPARATOR(), _separatorOf("WorkerRegistry"), "registry");
        assertEq(_tokenOfVectors().DOMAIN_SEPARATOR(), _separatorOf("MusterToken"), "token");
    }

    function _ledgerOfVectors() private returns (ContributionLedger) {
        address at = _domainOf("ContributionLedger");
        vm.etch(at, address(ledger).code);
        return ContributionLedger(at);
    }

    function _registryOfVectors() private returns (WorkerRegistry) {
        address at = _domainOf("WorkerRegistry");
        vm.etch(at, address(workers).code);
        return WorkerRegistry(at);
    }

    function _tokenOfVectors() private returns (MusterToken) {
        address at = _domainOf("MusterToken");
        vm.etch(at, address(token).code);
        return MusterToken(at);
    }

    /// @dev Checks struct hash, digest and signature of one message against its encoded fields.
    function _checkMessage(string memory name, bytes memory fields) private view {
        string memory at = string.concat(".messages.", name);
        bytes32 typeHash = keccak256(bytes(vm.parseJsonString(_eip712, string.concat(at, ".type"))));
        bytes32 structHash = keccak256(bytes.concat(typeHash, fields));
        assertEq(structHash, vm.parseJsonBytes32(_eip712, string.concat(at, ".struct_hash")), "struct hash");
        bytes32 separator = _separatorOf(vm.parseJsonString(_eip712, string.concat(at, ".contract")));
        bytes32 digest = keccak256(bytes.concat(hex"1901", separator, structHash));
        assertEq(digest, vm.parseJsonBytes32(_eip712, string.concat(at, ".digest")), "digest");
        uint256 key = uint256(vm.parseJsonBytes32(_eip712, string.concat(at, ".private_key")));
        assertEq(
            _sign(key, separator, structHash),
            vm.parseJsonBytes(_eip712, string.concat(at, ".signature")),
            "the same deterministic signature"
        );
    }

    function test_message_nodeRegistration() public view {
        bytes memory who = abi.encode(_address("NodeRegistration", "worker"), _address("NodeRegistration", "node"));
        bytes memory when = abi.encode(_uint("NodeRegistration", "nonce"), _uint("NodeRegistration", "deadline"));
        _checkMessage("NodeRegistration", bytes.concat(who, when));
    }

    function test_message_checkpoint() public view {
        _checkMessage(
            "Checkpoint",
            abi.encode(
                _uint("Checkpoint", "runId"), _uint("Checkpoint", "version"), _bytes32("Checkpoint", "manifestRoot")
            )
        );
    }

    function test_message_ticket() public view {
        bytes memory slot = abi.encode(
            _uint("Ticket", "runId"), _address("Ticket", "worker"), _uint("Ticket", "step"), _uint("Ticket", "index")
        );
        bytes memory policy = abi.encode(
            _uint("Ticket", "policyVersion"),
            _bytes32("Ticket", "policyRoot"),
            _bytes32("Ticket", "beacon"),
            _uint("Ticket", "deadline")
        );
        _checkMessage("Ticket", bytes.concat(slot, policy));
    }

    function test_message_submission() public view {
        _checkMessage("Submission", abi.encode(_submissionOfVectors()));
    }

    function test_message_outcomes() public view {
        _checkMessage(
            "Outcomes",
            abi.encode(
                _uint("Outcomes", "batchId"), _bytes32("Outcomes", "batchRoot"), _bytes32("Outcomes", "recordsHash")
            )
        );
    }

    function test_message_apiRequest() public view {
        bytes memory texts = abi.encode(
            keccak256(bytes(_string("ApiRequest", "audience"))),
            keccak256(bytes(_string("ApiRequest", "method"))),
            keccak256(bytes(_string("ApiRequest", "path")))
        );
        bytes memory rest = abi.encode(
            _bytes32("ApiRequest", "bodyHash"), _bytes32("ApiRequest", "nonce"), _uint("ApiRequest", "issuedAt")
        );
        _checkMessage("ApiRequest", bytes.concat(texts, rest));
    }

    function test_message_permit() public view {
        bytes memory who = abi.encode(_address("Permit", "owner"), _address("Permit", "spender"));
        bytes memory what = abi.encode(_uint("Permit", "value"), _uint("Permit", "nonce"), _uint("Permit", "deadline"));
        _checkMessage("Permit", bytes.concat(who, what));
    }

    function _uint(string memory message, string memory name) private view returns (uint256) {
        return vm.parseJsonUint(_eip712, _field(message, name));
    }

    function _address(string memory message, string memory name) private view returns (address) {
        return vm.parseJsonAddress(_eip712, _field(message, name));
    }

    function _bytes32(string memory message, string memory name) private view returns (bytes32) {
        return vm.parseJsonBytes32(_eip712, _field(message, name));
    }

    function _string(string memory message, string memory name) private view returns (string memory) {
        return vm.parseJsonString(_eip712, _field(message, name));
    }

    function _submissionOfVectors() private view returns (IContributionLedger.Submission memory) {
        return IContributionLedger.Submission({
            runId: uint64(_uint("Submission", "runId")),
            worker: _address("Submission", "worker"),
            step: uint32(_uint("Submission", "step")),
            index: uint32(_uint("Submission", "index")),
            policyVersion: uint32(_uint("Submission", "policyVersion")),
            fileHash: _bytes32("Submission", "fileHash"),
            rollouts: uint32(_uint("Submission", "rollouts")),
            units: uint64(_uint("Submission", "units"))
        });
    }

    // ------------------------------------------- contracts accept Python's signatures

    function test_permit_isAccepted() public {
        MusterToken token_ = _tokenOfVectors();
        bytes memory signature = vm.parseJsonBytes(_eip712, ".messages.Permit.signature");
        (bytes32 r, bytes32 s) = abi.decode(signature, (bytes32, bytes32));
        (address worker, address spender, uint256 value) =
            (_address("Permit", "owner"), _address("Permit", "spender"), _uint("Permit", "value"));
        uint256 deadline = _uint("Permit", "deadline");
        uint8 v = uint8(signature[64]);
        token_.permit(worker, spender, value, deadline, v, r, s);
        assertEq(token_.allowance(worker, spender), value, "allowance");
        vm.expectPartialRevert(ERC20Permit.ERC2612InvalidSigner.selector);
        token_.permit(worker, spender, value, deadline, v, r, s);
    }

    function test_nodeRegistration_isAccepted() public {
        WorkerRegistry registry = _registryOfVectors();
        _createRun();
        address worker = _address("NodeRegistration", "worker");
        IWorkerRegistry.NodeConsent memory consent = IWorkerRegistry.NodeConsent({
            node: _address("NodeRegistration", "node"),
            deadline: _uint("NodeRegistration", "deadline"),
            signature: vm.parseJsonBytes(_eip712, ".messages.NodeRegistration.signature")
        });
        // The vault takes stake for one registry, which is not the copy at the vectors' address.
        _deposit(1, worker, alice, REQUIRED_STAKE);
        vm.prank(worker);
        registry.join(1, 1, 0, consent, _noPermit());
        assertEq(registry.workerOfNode(consent.node), worker, "bound");
    }

    function _deposit(uint64 run, address worker, address payer, uint256 amount) private {
        vm.prank(payer);
        vault.deposit(run, worker, amount);
    }

    /// @dev Submission and ticket of the vectors are of one slot: a worker submits them by itself.
    function test_leasedWork_isAccepted() public {
        ContributionLedger ledger_ = _startRunOfVectors();
        IContributionLedger.LeasedWork memory work = _workOfVectors();
        _join(1, work.submission.worker, _address("NodeRegistration", "node"));
        vm.mockCall(address(court), abi.encodeWithSelector(court.takeBond.selector), "");
        vm.prank(work.submission.worker);
        uint64 batchId = ledger_.submitDirect(work, new string[](0));
        assertEq(batchId, 1, "committed");
    }

    function test_leasedWork_isRefused_withAnotherTicket() public {
        ContributionLedger ledger_ = _startRunOfVectors();
        IContributionLedger.LeasedWork memory work = _workOfVectors();
        _join(1, work.submission.worker, _address("NodeRegistration", "node"));
        work.ticket.beacon = keccak256("another beacon");
        vm.expectPartialRevert(IContributionLedgerErrors.LedgerInvalidTicket.selector);
        vm.prank(work.submission.worker);
        ledger_.submitDirect(work, new string[](0));
    }

    function _workOfVectors() private view returns (IContributionLedger.LeasedWork memory work) {
        work.submission = _submissionOfVectors();
        work.nodeSignature = vm.parseJsonBytes(_eip712, ".messages.Submission.signature");
        work.ticket = IContributionLedger.Ticket({
            runId: uint64(_uint("Ticket", "runId")),
            worker: _address("Ticket", "worker"),
            step: uint32(_uint("Ticket", "step")),
            index: uint32(_uint("Ticket", "index")),
            policyVersion: uint32(_uint("Ticket", "policyVersion")),
            policyRoot: _bytes32("Ticket", "policyRoot"),
            beacon: _bytes32("Ticket", "beacon"),
            deadline: uint64(_uint("Ticket", "deadline"))
        });
        work.ticketSignature = vm.parseJsonBytes(_eip712, ".messages.Ticket.signature");
    }

    /// @dev Joins the real registry, which the ledger's copy asks, with the vectors' node.
    function _join(uint64 run, address worker, address node) private {
        _deposit(run, worker, alice, REQUIRED_STAKE);
        uint256 key = uint256(vm.parseJsonBytes32(_eip712, ".messages.NodeRegistration.private_key"));
        _join(run, worker, node, key, 0);
    }

    // -------------------------------------------------------------------- batch

    function test_submissionLeaves() public view {
        bytes32[] memory leaves = new bytes32[](5);
        for (uint256 i = 0; i < 5; ++i) {
            string memory fields = _at(".submissions", i, "fields");
            IContributionLedger.Submission memory submission = _submissionOfVectors();
            submission.index = uint32(vm.parseJsonUint(_batch, string.concat(fields, ".index")));
            submission.fileHash = vm.parseJsonBytes32(_batch, string.concat(fields, ".fileHash"));
            submission.units = uint64(vm.parseJsonUint(_batch, string.concat(fields, ".units")));
            leaves[i] = keccak256(abi.encode(_submissionHash(submission)));
            assertEq(leaves[i], vm.parseJsonBytes32(_batch, _at(".submissions", i, "leaf")), "leaf");
        }
        assertEq(_batchRoot(leaves), vm.parseJsonBytes32(_batch, ".batch_root"), "root");
        for (uint256 i = 0; i < leaves.length; ++i) {
            bytes32[] memory proof = vm.parseJsonBytes32Array(_batch, _at(".submissions", i, "proof"));
            assertEq(keccak256(abi.encode(_batchSiblings(leaves, i))), keccak256(abi.encode(proof)), "proof");
        }
    }

    function _headerOfVectors(uint256 i) private view returns (IContributionLedger.Batch memory header) {
        header.batchId = uint64(vm.parseJsonUint(_batch, _at(".headers", i, "batch_id")));
        header.runId = uint64(vm.parseJsonUint(_batch, _at(".headers", i, "run_id")));
        header.root = vm.parseJsonBytes32(_batch, _at(".headers", i, "root"));
        header.outcomesRoot = vm.parseJsonBytes32(_batch, _at(".headers", i, "outcomes_root"));
        header.count = uint32(vm.parseJsonUint(_batch, _at(".headers", i, "count")));
        header.units = uint64(vm.parseJsonUint(_batch, _at(".headers", i, "units")));
        header.pricePerUnit = uint88(vm.parseJsonUint(_batch, _at(".headers", i, "price_per_unit")));
        header.terms = uint32(vm.parseJsonUint(_batch, _at(".headers", i, "terms")));
        header.committedAt = uint40(vm.parseJsonUint(_batch, _at(".headers", i, "committed_at")));
        header.postedAt = uint40(vm.parseJsonUint(_batch, _at(".headers", i, "posted_at")));
        header.signers = uint88(vm.parseJsonUint(_batch, _at(".headers", i, "signers")));
        header.status = IContributionLedger.BatchStatus(vm.parseJsonUint(_batch, _at(".headers", i, "status")));
    }

    /// @dev A run of the vectors' validators and orchestrator, on a ledger at the vectors' address.
    function _startRunOfVectors() private returns (ContributionLedger ledger_) {
        ledger_ = _ledgerOfVectors();
        IRunRegistry.RunConfig memory config = _config();
        config.orchestrator = vm.parseJsonAddress(_eip712, ".messages.Ticket.signer");
        bytes32[] memory keys = vm.parseJsonBytes32Array(_batch, ".validator_keys");
        config.validators = new address[](keys.length);
        for (uint256 i = 0; i < keys.length; ++i) {
            config.validators[i] = vm.addr(uint256(keys[i]));
        }
        runs.createRun(config);
        for (uint256 i = 0; i < keys.length; ++i) {
            _deposit(1, config.validators[i], alice, REQUIRED_VALIDATOR_STAKE);
            vm.prank(config.validators[i]);
            runs.takeSeat(1, 1, 0);
        }
        // The escrow knows one ledger, which is not the copy at the vectors' address.
        vm.mockCall(address(escrow), abi.encodeWithSelector(escrow.reserve.selector), "");
    }

    /// @dev Commits the vectors' batch, and posts what the vectors' validators signed, at the vectors' times.
    function _postBatchOfVectors(bytes memory records, string memory signatures)
        private
        returns (ContributionLedger ledger_)
    {
        ledger_ = _startRunOfVectors();
        IContributionLedger.Batch memory header = _headerOfVectors(0);
        vm.warp(header.committedAt);
        vm.prank(vm.parseJsonAddress(_eip712, ".messages.Ticket.signer"));
        ledger_.commitBatch(1, header.root, header.count, header.units);
        bytes32 committed = vm.parseJsonBytes32(_batch, ".headers[0].commitment");
        assertEq(ledger_.commitmentOf(1), committed, "what the ledger keeps of a committed batch");
        vm.warp(_headerOfVectors(1).postedAt);
        ledger_.postOutcomes(header, records, vm.parseJsonBytes(_batch, signatures));
    }

    function _judgeBatchOfVectors() private returns (ContributionLedger) {
        return _postBatchOfVectors(vm.parseJsonBytes(_batch, ".packed"), ".signatures");
    }

    function test_withheld_isAccepted_andTheHeaderAgrees() public {
        ContributionLedger ledger_ = _postBatchOfVectors("", ".withheld_signatures");
        bytes32 withheld = vm.parseJsonBytes32(_batch, ".headers[2].commitment");
        assertEq(ledger_.commitmentOf(1), withheld, "status, time and both signers");
    }

    function test_outcomes_areAccepted_andTheHeaderAgrees() public {
        ContributionLedger ledger_ = _judgeBatchOfVectors();
        bytes32 posted = vm.parseJsonBytes32(_batch, ".headers[1].commitment");
        assertEq(ledger_.commitmentOf(1), posted, "root, time and both signers");
        assertFalse(ledger_.isDisputed(_headerOfVectors(1)), "the header is the batch's");
        assertEq(
            _headerOfVectors(1).outcomesRoot, vm.parseJsonBytes32(_batch, ".outcomes_root"), "root over the outcomes"
        );
    }

    function test_records_decode() public {
        ContributionLedger ledger_ = _judgeBatchOfVectors();
        for (uint256 i = 0; i < 5; ++i) {
            IContributionLedger.Standing memory standing = ledger_.standingOf(
                IContributionLedger.OutcomeProof({
                    batch: _headerOfVectors(1),
                    position: uint32(i),
                    record: vm.parseJsonBytes(_batch, _at(".records", i, "record")),
                    proof: vm.parseJsonBytes32Array(_batch, _at(".records", i, "proof"))
                })
            );
            assertEq(standing.leaf, vm.parseJsonBytes32(_batch, _at(".records", i, "leaf")), "leaf");
            _checkOutcome(i, standing.outcome);
        }
    }

    function _checkOutcome(uint256 i, IContributionLedger.Outcome memory outcome) private view {
        assertEq(outcome.workerId, vm.parseJsonUint(_batch, _at(".records", i, "worker_id")), "worker id");
        assertEq(outcome.step, vm.parseJsonUint(_batch, _at(".records", i, "step")), "step");
        assertEq(outcome.index, vm.parseJsonUint(_batch, _at(".records", i, "index")), "index");
        assertEq(outcome.policyVersion, vm.parseJsonUint(_batch, _at(".records", i, "policy_version")), "policy");
        assertEq(outcome.fileHash, vm.parseJsonBytes32(_batch, _at(".records", i, "file_hash")), "file");
        assertEq(outcome.rollouts, vm.parseJsonUint(_batch, _at(".records", i, "rollouts")), "rollouts");
        assertEq(outcome.units, vm.parseJsonUint(_batch, _at(".records", i, "units")), "units");
        assertEq(outcome.verdict, vm.parseJsonUint(_batch, _at(".records", i, "verdict")), "verdict");
        assertEq(outcome.reason, vm.parseJsonUint(_batch, _at(".records", i, "reason")), "reason");
        bool exact = vm.parseJsonBool(_batch, _at(".records", i, "is_exact_fraud"));
        assertEq(OutcomeRecordLib.isExact(outcome.verdict, outcome.reason), exact, "exact");
    }

    // ------------------------------------------------------------------- juries

    function test_juries() public {
        for (uint256 i = 0; vm.keyExistsJson(_jury, string.concat(".cases[", vm.toString(i), "]")); ++i) {
            uint256 before = vm.snapshotState();
            _replayBench(i);
            assertEq(jury.placeCount(), vm.parseJsonUint(_jury, _at(".cases", i, "places")), "places");
            bytes32 blockHash = vm.parseJsonBytes32(_jury, _at(".cases", i, "block_hash"));
            bytes32 seed = keccak256(abi.encode(blockHash, vm.parseJsonBytes32(_jury, _at(".cases", i, "case_id"))));
            assertEq(seed, vm.parseJsonBytes32(_jury, _at(".cases", i, "seed")), "seed");
            address[] memory drawn = jury.draw(
                seed,
                jury.placeCount(),
                vm.parseJsonUint(_jury, _at(".cases", i, "opened_at")),
                vm.parseJsonUint(_jury, _at(".cases", i, "size")),
                vm.parseJsonAddressArray(_jury, _at(".cases", i, "excluded"))
            );
            assertEq(drawn, vm.parseJsonAddressArray(_jury, _at(".cases", i, "jurors")), "jury");
            vm.revertToState(before);
        }
    }

    /// @dev Whoever joined and left does so again, at its time.
    function _replayBench(uint256 i) private {
        address[] memory who = vm.parseJsonAddressArray(_jury, _at(".cases", i, "who"));
        uint256[] memory when = vm.parseJsonUintArray(_jury, _at(".cases", i, "when"));
        bool[] memory joins = vm.parseJsonBoolArray(_jury, _at(".cases", i, "joins"));
        for (uint256 k = 0; k < who.length; ++k) {
            vm.warp(when[k]);
            if (joins[k]) _enrich(who[k]);
            vm.prank(who[k]);
            if (joins[k]) jury.join(REQUIRED_JUROR_STAKE);
            else jury.leave();
        }
    }

    function test_summons() public view {
        for (uint256 i = 0; i < 2; ++i) {
            uint64 batchId = uint64(vm.parseJsonUint(_jury, _at(".summons", i, "batch_id")));
            bytes32 caseId = vm.parseJsonBytes32(_jury, _at(".summons", i, "case_id"));
            assertEq(keccak256(abi.encode("muster.summons", batchId)), caseId, "name of the case");
        }
    }

    function test_claims() public view {
        (bytes32 leaf, address account) = _caseOfVectors();
        bytes32 salt = vm.parseJsonBytes32(_jury, ".salt");
        for (uint256 i = 0; vm.keyExistsJson(_jury, string.concat(".claims[", vm.toString(i), "]")); ++i) {
            uint8 verdict = uint8(vm.parseJsonUint(_jury, _at(".claims", i, "verdict")));
            uint8 reason = uint8(vm.parseJsonUint(_jury, _at(".claims", i, "reason")));
            uint16 ruling = uint16(vm.parseJsonUint(_jury, _at(".claims", i, "ruling")));
            assertEq(uint16(verdict) << 8 | reason, ruling, "ruling");
            bool exact = vm.parseJsonBool(_jury, _at(".claims", i, "is_exact"));
            assertEq(OutcomeRecordLib.isExact(verdict, reason), exact, "exact");
            bytes32 announced = vm.parseJsonBytes32(_jury, _at(".claims", i, "announcement"));
            assertEq(keccak256(abi.encode(account, leaf, ruling, salt)), announced, "announcement");
        }
    }

    function test_votes() public view {
        (bytes32 leaf, address account) = _caseOfVectors();
        bytes32 result = vm.parseJsonBytes32(_jury, ".result_hash");
        bytes32 salt = vm.parseJsonBytes32(_jury, ".salt");
        for (uint256 i = 0; vm.keyExistsJson(_jury, string.concat(".votes[", vm.toString(i), "]")); ++i) {
            uint16 ruling = uint16(vm.parseJsonUint(_jury, _at(".votes", i, "ruling")));
            bytes32 committed = vm.parseJsonBytes32(_jury, _at(".votes", i, "commitment"));
            assertEq(keccak256(abi.encode(leaf, account, ruling, result, salt)), committed, "commitment");
        }
    }

    function _caseOfVectors() private view returns (bytes32 leaf, address account) {
        return (vm.parseJsonBytes32(_jury, ".leaf"), vm.parseJsonAddress(_jury, ".account"));
    }

    // -------------------------------------------------------------------- trees

    function test_merkle() public view {
        for (uint256 t = 0; vm.keyExistsJson(_merkle, string.concat(".trees[", vm.toString(t), "]")); ++t) {
            bytes32[] memory leaves = vm.parseJsonBytes32Array(_merkle, _at(".trees", t, "leaves"));
            bytes32 root = vm.parseJsonBytes32(_merkle, _at(".trees", t, "root"));
            assertEq(_root(leaves), root, "root");
            for (uint256 i = 0; i < leaves.length; ++i) {
                string memory at = string.concat(_at(".trees", t, "proofs"), "[", vm.toString(i), "]");
                bytes32[] memory proof = vm.parseJsonBytes32Array(_merkle, at);
                assertEq(_siblings(leaves, i), proof, "proof");
                assertTrue(MerkleProof.verify(proof, root, leaves[i]), "OpenZeppelin agrees");
            }
        }
    }

    function test_multiProofs() public {
        MultiProofs proofs = new MultiProofs();
        for (uint256 t = 0; vm.keyExistsJson(_merkle, string.concat(".trees[", vm.toString(t), "]")); ++t) {
            bytes32[] memory leaves = vm.parseJsonBytes32Array(_merkle, _at(".trees", t, "leaves"));
            bytes32 expected = vm.parseJsonBytes32(_merkle, _at(".trees", t, "root"));
            string memory parts = _at(".trees", t, "multi_proofs");
            for (uint256 p = 0; vm.keyExistsJson(_merkle, string.concat(parts, "[", vm.toString(p), "]")); ++p) {
                uint32[] memory positions = _positions(_at(parts, p, "positions"));
                bytes32[] memory chosen = new bytes32[](positions.length);
                for (uint256 i = 0; i < chosen.length; ++i) {
                    chosen[i] = leaves[positions[i]];
                }
                bytes32[] memory siblings = vm.parseJsonBytes32Array(_merkle, _at(parts, p, "siblings"));
                (bytes32 root, bool valid) = proofs.rootOf(chosen, positions, leaves.length, siblings);
                assertTrue(valid, "valid");
                assertEq(root, expected, "root");
            }
        }
    }

    // --------------------------------------------------------------- deployment

    function test_deployment() public {
        address account = vm.parseJsonAddress(_deployment, ".account");
        bytes memory code = bytes.concat(type(NetworkFactory).creationCode, abi.encode(account));
        vm.etch(CREATE2_FACTORY, PROXY_CODE);
        (bool made,) = CREATE2_FACTORY.call(bytes.concat(vm.parseJsonBytes32(_deployment, ".salt"), code));
        assertTrue(made, "the proxy makes the factory");
        NetworkFactory factory = NetworkFactory(vm.parseJsonAddress(_deployment, ".factory"));
        address[] memory created = vm.parseJsonAddressArray(_deployment, ".created");
        assertEq(created.length, 9, "every contract");
        for (uint256 i = 0; i < created.length; ++i) {
            vm.prank(account);
            factory.create(created[i], bytes.concat(type(MusterToken).creationCode, abi.encode(i, account)));
            assertEq(MusterToken(created[i]).totalSupply(), i, "arguments");
        }
    }

    function _positions(string memory at) private view returns (uint32[] memory positions) {
        uint256[] memory wide = vm.parseJsonUintArray(_merkle, at);
        positions = new uint32[](wide.length);
        for (uint256 i = 0; i < wide.length; ++i) {
            positions[i] = uint32(wide[i]);
        }
    }
}
