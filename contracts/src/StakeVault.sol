// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IJuryPool} from "./interfaces/IJuryPool.sol";
import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IRunRegistry} from "./interfaces/IRunRegistry.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";
import {EscrowLib} from "./libraries/EscrowLib.sol";

/// @title Holds all stake, and is the only contract that does
/// @dev No reentrancy guard: the token has no hooks, and state is written before every call out.
contract StakeVault is IStakeVault {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;

    /// @dev Stake of one owner in one run.
    struct StoredAccount {
        // slot 0: all that a slash reads and writes
        uint88 active;
        uint88 unbonding;
        // The newest offence, which the next one is linked to while an escrow is held.
        uint64 lastTag;
        Offence lastOffence;
        uint8 held;
        // slot 1
        uint64 withdrawableAt;
    }

    /// @dev Where the other contracts are.
    struct Network {
        IRunRegistry runs;
        IWorkerRegistry workers;
        IJuryPool jurors;
        IContributionLedger ledger;
        address court;
        address faults;
    }

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @dev Offences that follow stake which comes back: what a transaction can hold.
    uint256 private constant MAX_LATER = 256;

    /// @dev The run whose stake is the jurors'.
    uint64 private constant BENCH = 0;

    /// @notice The token held.
    IMusterToken public immutable token;

    /// @notice The registry of validators, told when stake falls.
    IRunRegistry public immutable runs;

    /// @notice The registry of workers, told when stake falls.
    IWorkerRegistry public immutable workers;

    /// @notice The network's jurors, told when stake falls.
    IJuryPool public immutable jurors;

    /// @notice The ledger, which executes fraud verdicts.
    address public immutable ledger;

    /// @notice The court, which overturns them and fines signers and jurors.
    address public immutable court;

    /// @notice The court of faults that prove themselves.
    address public immutable faults;

    /// @notice The account that receives the insured share of slashed stake.
    address public immutable insurance;

    /// @inheritdoc IStakeVault
    uint256 public immutable unbondingPeriod;

    /// @notice Millionths of slashed stake that go to `insurance`.
    uint256 public immutable insurancePpm;

    /// @notice Millionths of slashed stake that go to a reporter whom a jury confirmed.
    uint256 public immutable reporterPpm;

    /// @notice The most a reporter gets for one offence, in token wei.
    uint256 public immutable reporterCap;

    mapping(uint64 runId => mapping(address owner => StoredAccount)) private _accounts;
    mapping(bytes32 escrowId => Escrow) private _escrows;
    /// @dev The offence after this one, of the same account, if it came while an escrow was held.
    mapping(bytes32 escrowId => bytes32) private _next;

    modifier only(address caller) {
        require(msg.sender == caller, VaultUnauthorized(msg.sender));
        _;
    }

    modifier onlyRegistries() {
        require(
            msg.sender == address(workers) || msg.sender == address(runs) || msg.sender == address(jurors),
            VaultUnauthorized(msg.sender)
        );
        _;
    }

    /// @notice Deployed last: it reads the deadlines of the ledger, which holds its predicted address.
    /// @param insurance_ Receives the insured share; may be zero only if `insurancePpm_` is.
    /// @param unbondingPeriod_ Seconds; must exceed the ledger's `judgementTime`.
    /// @param insurancePpm_ Millionths of slashed stake for insurance.
    /// @param reporterPpm_ Millionths for a reporter. What is left of a million is burned.
    /// @param reporterCap_ The most a reporter gets for one offence, in token wei.
    constructor(
        IMusterToken token_,
        Network memory network,
        address insurance_,
        uint256 unbondingPeriod_,
        uint256 insurancePpm_,
        uint256 reporterPpm_,
        uint256 reporterCap_
    ) {
        uint256 judged = network.ledger.judgementTime();
        require(unbondingPeriod_ > judged, VaultUnbondingTooShort(unbondingPeriod_, judged));
        require(insurancePpm_ + reporterPpm_ <= PPM, VaultInvalidShares(insurancePpm_ + reporterPpm_));
        require(insurance_ != address(0) || insurancePpm_ == 0, VaultInvalidShares(insurancePpm_));
        token = token_;
        runs = network.runs;
        workers = network.workers;
        jurors = network.jurors;
        ledger = address(network.ledger);
        court = network.court;
        faults = network.faults;
        insurance = insurance_;
        unbondingPeriod = unbondingPeriod_;
        insurancePpm = insurancePpm_;
        reporterPpm = reporterPpm_;
        reporterCap = reporterCap_;
    }

    // ------------------------------------------------------------------ deposit

    /// @inheritdoc IStakeVault
    function deposit(uint64 runId, address owner, uint256 amount) external {
        _deposit(runId, owner, msg.sender, amount);
    }

    /// @inheritdoc IStakeVault
    function depositFrom(uint64 runId, address owner, uint256 amount) external onlyRegistries {
        _deposit(runId, owner, owner, amount);
    }

    function _deposit(uint64 runId, address owner, address from, uint256 amount) private {
        require(amount != 0, VaultZeroAmount());
        StoredAccount storage account = _accounts[runId][owner];
        uint256 active = account.active + amount;
        // An account stays below 2^88, so that an escrow of all of it fits.
        (active + account.unbonding).toUint88();
        account.active = active.toUint88();
        emit Deposited(runId, owner, amount, active);
        token.safeTransferFrom(from, address(this), amount);
    }

    // ------------------------------------------------------------------- unbond

    /// @inheritdoc IStakeVault
    function requestUnbond(uint64 runId, uint256 amount) external {
        require(amount != 0, VaultZeroAmount());
        _unbond(runId, msg.sender, amount);
        _tellThatStakeFell(runId, msg.sender);
    }

    /// @inheritdoc IStakeVault
    function requestUnbondFor(uint64 runId, address owner) external onlyRegistries {
        uint256 active = _accounts[runId][owner].active;
        if (active != 0) _unbond(runId, owner, active);
    }

    function _unbond(uint64 runId, address owner, uint256 amount) private {
        StoredAccount storage account = _accounts[runId][owner];
        uint256 active = account.active;
        require(amount <= active, VaultInsufficientStake(runId, owner, amount, active));
        uint256 unbonding = account.unbonding + amount;
        uint256 withdrawableAt = block.timestamp + unbondingPeriod;
        account.active = (active - amount).toUint88();
        account.unbonding = unbonding.toUint88();
        account.withdrawableAt = withdrawableAt.toUint64();
        emit UnbondRequested(runId, owner, amount, unbonding, withdrawableAt);
    }

    /// @inheritdoc IStakeVault
    function withdraw(uint64 runId) external returns (uint256 amount) {
        StoredAccount storage account = _accounts[runId][msg.sender];
        amount = account.unbonding;
        uint256 withdrawableAt = account.withdrawableAt;
        require(
            amount != 0 && block.timestamp >= withdrawableAt,
            VaultNotWithdrawable(runId, msg.sender, amount, withdrawableAt)
        );
        account.unbonding = 0;
        account.withdrawableAt = 0;
        emit Withdrawn(runId, msg.sender, amount);
        token.safeTransfer(msg.sender, amount);
    }

    /// @dev Whoever no longer holds what its role requires loses the role in the same transaction.
    function _tellThatStakeFell(uint64 runId, address owner) private {
        if (runId == BENCH) {
            jurors.retireForLowStake(owner);
        } else {
            workers.jailForLowStake(runId, owner);
            runs.unseatForLowStake(runId, owner);
        }
    }

    // -------------------------------------------------------------------- slash

    /// @inheritdoc IStakeVault
    function hold(Verdict calldata verdict, uint256 ppm) external only(ledger) returns (uint256 amount) {
        (uint64 runId, address owner) = (verdict.runId, verdict.owner);
        bytes32 id = escrowIdOf(runId, owner, verdict.offence, verdict.tag);
        amount = _take(verdict, id, ppm);
        _escrows[id] = Escrow({
            amount: amount.toUint88(),
            ppm: ppm.toUint24(),
            batchId: verdict.batchId,
            position: verdict.position,
            status: EscrowStatus.Held
        });
        StoredAccount storage account = _accounts[runId][owner];
        uint8 held = account.held;
        require(held != type(uint8).max, VaultTooManyEscrows(runId, owner));
        // Cannot overflow: just compared.
        unchecked {
            account.held = held + 1;
        }
        workers.jailForLowStake(runId, owner);
    }

    /// @inheritdoc IStakeVault
    function slash(uint64 runId, address owner, Offence offence, uint64 tag, uint256 ppm, address reporter)
        external
        returns (uint256 amount)
    {
        require(msg.sender == court || msg.sender == faults, VaultUnauthorized(msg.sender));
        bytes32 id = escrowIdOf(runId, owner, offence, tag);
        amount = _take(Verdict(runId, owner, offence, tag, 0, 0), id, ppm);
        _escrows[id] = Escrow({
            amount: amount.toUint88(), ppm: ppm.toUint24(), batchId: 0, position: 0, status: EscrowStatus.Released
        });
        _split(id, amount, reporter);
        _tellThatStakeFell(runId, owner);
    }

    /// @dev Takes stake from an account and links the offence to those before it.
    function _take(Verdict memory verdict, bytes32 id, uint256 ppm) private returns (uint256) {
        require(ppm <= PPM, VaultInvalidShares(ppm));
        require(_escrows[id].status == EscrowStatus.None, VaultOffenceSettled(id));
        StoredAccount storage account = _accounts[verdict.runId][verdict.owner];
        if (account.held != 0) {
            _next[escrowIdOf(verdict.runId, verdict.owner, account.lastOffence, account.lastTag)] = id;
        }
        uint256 fromActive = Math.ceilDiv(account.active * ppm, PPM);
        uint256 fromUnbonding = Math.ceilDiv(account.unbonding * ppm, PPM);
        account.active = (account.active - fromActive).toUint88();
        account.unbonding = (account.unbonding - fromUnbonding).toUint88();
        account.lastTag = verdict.tag;
        account.lastOffence = verdict.offence;
        emit Slashed(verdict.runId, verdict.owner, id, verdict, fromActive, fromUnbonding);
        return fromActive + fromUnbonding;
    }

    // ---------------------------------------------------------- release, restore

    /// @inheritdoc IStakeVault
    function release(Verdict calldata verdict, address reporter) external only(ledger) {
        (bytes32 id, Escrow storage escrow) = _escrowOf(verdict);
        require(escrow.status == EscrowStatus.Held, VaultOffenceSettled(id));
        require(_isOf(escrow, verdict), VaultWrongLeaf(id, verdict.batchId, verdict.position));
        escrow.status = EscrowStatus.Released;
        --_accounts[verdict.runId][verdict.owner].held;
        _split(id, escrow.amount, reporter);
    }

    /// @inheritdoc IStakeVault
    function restore(Verdict calldata verdict) external only(court) returns (bool) {
        (bytes32 id, Escrow storage escrow) = _escrowOf(verdict);
        // The same slot may be convicted in another batch; what a case does not own it does not touch.
        if (escrow.status != EscrowStatus.Held || !_isOf(escrow, verdict)) return false;
        escrow.status = EscrowStatus.Restored;
        uint256 amount = escrow.amount;
        uint256 returned = _payLaterOffences(id, amount);
        StoredAccount storage account = _accounts[verdict.runId][verdict.owner];
        --account.held;
        account.active = (account.active + returned).toUint88();
        emit SlashRestored(verdict.runId, verdict.owner, id, returned, amount - returned);
        return true;
    }

    function _escrowOf(Verdict calldata verdict) private view returns (bytes32 id, Escrow storage escrow) {
        id = escrowIdOf(verdict.runId, verdict.owner, verdict.offence, verdict.tag);
        escrow = _escrows[id];
    }

    /// @dev Returns whether an escrow belongs to this outcome.
    function _isOf(Escrow storage escrow, Verdict calldata verdict) private view returns (bool) {
        return escrow.batchId == verdict.batchId && escrow.position == verdict.position;
    }

    /// @dev Later offences take of returned stake what they would have taken had it been there: as if the escrow had
    ///      never been. Returns what is left. There are as many as came while an escrow was held; 256 of them count.
    function _payLaterOffences(bytes32 from, uint256 amount) private returns (uint256) {
        bytes32 id = _next[from];
        for (uint256 i = 0; id != 0 && amount != 0 && i < MAX_LATER; (id, i) = (_next[id], i + 1)) {
            Escrow storage later = _escrows[id];
            if (later.status == EscrowStatus.Restored) continue;
            uint256 share = Math.ceilDiv(amount * later.ppm, PPM);
            amount -= share;
            later.amount = (later.amount + share).toUint88();
            emit SlashFollowed(id, from, share);
            if (later.status == EscrowStatus.Released) _split(id, share, address(0));
        }
        return amount;
    }

    /// @dev Splits stake for good into burn, insurance and the reporter's share.
    function _split(bytes32 id, uint256 amount, address reporter) private {
        uint256 insured = amount * insurancePpm / PPM;
        uint256 rewarded = reporter == address(0) ? 0 : Math.min(amount * reporterPpm / PPM, reporterCap);
        uint256 burned = amount - insured - rewarded;
        emit SlashReleased(id, reporter, burned, insured, rewarded);
        token.burn(burned);
        if (insured != 0) token.safeTransfer(insurance, insured);
        if (rewarded != 0) token.safeTransfer(reporter, rewarded);
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IStakeVault
    function accountOf(uint64 runId, address owner) external view returns (Account memory) {
        StoredAccount storage account = _accounts[runId][owner];
        return Account({
            active: account.active,
            unbonding: account.unbonding,
            withdrawableAt: account.withdrawableAt,
            held: account.held
        });
    }

    /// @inheritdoc IStakeVault
    function activeStake(uint64 runId, address owner) external view returns (uint256) {
        return _accounts[runId][owner].active;
    }

    /// @inheritdoc IStakeVault
    function escrowIdOf(uint64 runId, address owner, Offence offence, uint64 tag) public pure returns (bytes32) {
        return EscrowLib.idOf(runId, owner, offence, tag);
    }

    /// @inheritdoc IStakeVault
    function escrowOf(bytes32 escrowId) external view returns (Escrow memory) {
        return _escrows[escrowId];
    }
}
