// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {Math} from "@openzeppelin/contracts/utils/math/Math.sol";
import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";

import {IContributionLedger} from "./interfaces/IContributionLedger.sol";
import {IDisputeCourt} from "./interfaces/IDisputeCourt.sol";
import {IMusterToken} from "./interfaces/IMusterToken.sol";
import {IStakeVault} from "./interfaces/IStakeVault.sol";
import {IWorkerRegistry} from "./interfaces/IWorkerRegistry.sol";

/// @title Holds all stake, and is the only contract that does
/// @dev No reentrancy guard: the token has no hooks, and state is written before every call out.
contract StakeVault is IStakeVault {
    using SafeERC20 for IMusterToken;
    using SafeCast for uint256;

    /// @dev An escrow in storage: one slot when nobody reported the offence.
    struct StoredEscrow {
        // slot 0
        address owner;
        uint88 amount;
        EscrowStatus status;
        // slot 1
        address reporter;
    }

    /// @dev One million: the whole, in parts per million.
    uint256 private constant PPM = 1_000_000;

    /// @notice The token held.
    IMusterToken public immutable token;

    /// @notice The registry that is told when stake falls.
    IWorkerRegistry public immutable workers;

    /// @notice The ledger, which executes fraud verdicts.
    IContributionLedger public immutable ledger;

    /// @notice The court, which overturns them.
    IDisputeCourt public immutable court;

    /// @notice The court that punishes faults which prove themselves.
    address public immutable faults;

    /// @notice The account that receives the insured share of slashed stake.
    address public immutable insurance;

    /// @inheritdoc IStakeVault
    uint256 public immutable unbondingPeriod;

    /// @notice Millionths of a released escrow that go to `insurance`.
    uint256 public immutable insurancePpm;

    /// @notice Millionths of a released escrow that go to its reporter, if it has one.
    uint256 public immutable reporterPpm;

    /// @notice The most a reporter gets for one offence, in token wei.
    uint256 public immutable reporterCap;

    mapping(address owner => Account) private _accounts;
    mapping(bytes32 offence => StoredEscrow) private _escrows;

    modifier only(address caller) {
        require(msg.sender == caller, VaultUnauthorized(msg.sender));
        _;
    }

    modifier onlySlasher() {
        require(
            msg.sender == address(ledger) || msg.sender == address(court) || msg.sender == faults,
            VaultUnauthorized(msg.sender)
        );
        _;
    }

    /// @notice Deployed last: it reads the deadlines of `ledger_` and `court_`, which hold its predicted address.
    /// @param insurance_ Receives the insured share; may be zero only if `insurancePpm_` is.
    /// @param unbondingPeriod_ Seconds; must exceed outcome deadline + challenge window + jury time + pause of slashing.
    /// @param insurancePpm_ Millionths of slashed stake for insurance.
    /// @param reporterPpm_ Millionths for the reporter. What is left of a million is burned.
    /// @param reporterCap_ The most a reporter gets for one offence, in token wei.
    constructor(
        IMusterToken token_,
        IWorkerRegistry workers_,
        IContributionLedger ledger_,
        IDisputeCourt court_,
        address faults_,
        address insurance_,
        uint256 unbondingPeriod_,
        uint256 insurancePpm_,
        uint256 reporterPpm_,
        uint256 reporterCap_
    ) {
        uint256 judged = ledger_.judgementTime();
        require(unbondingPeriod_ > judged, VaultUnbondingTooShort(unbondingPeriod_, judged));
        require(insurancePpm_ + reporterPpm_ <= PPM, VaultInvalidShares(insurancePpm_ + reporterPpm_));
        require(insurance_ != address(0) || insurancePpm_ == 0, VaultInvalidShares(insurancePpm_));
        token = token_;
        workers = workers_;
        ledger = ledger_;
        court = court_;
        faults = faults_;
        insurance = insurance_;
        unbondingPeriod = unbondingPeriod_;
        insurancePpm = insurancePpm_;
        reporterPpm = reporterPpm_;
        reporterCap = reporterCap_;
    }

    // ------------------------------------------------------------------ deposit

    /// @inheritdoc IStakeVault
    function deposit(address owner, uint256 amount) external {
        _deposit(owner, msg.sender, amount);
    }

    /// @inheritdoc IStakeVault
    function depositWithPermit(uint256 amount, uint256 deadline, uint8 v, bytes32 r, bytes32 s) external {
        // A permit that somebody else already used has done its work: the transfer decides.
        try token.permit(msg.sender, address(this), amount, deadline, v, r, s) {} catch {}
        _deposit(msg.sender, msg.sender, amount);
    }

    /// @inheritdoc IStakeVault
    function depositFrom(address worker, uint256 amount) external only(address(workers)) {
        _deposit(worker, worker, amount);
    }

    function _deposit(address owner, address from, uint256 amount) private {
        require(amount != 0, VaultZeroAmount());
        Account storage account = _accounts[owner];
        uint256 active = account.active + amount;
        // An account stays below 2^88 so that an escrow of all of it fits its slot.
        (active + account.unbonding).toUint88();
        account.active = active.toUint128();
        emit Deposited(owner, amount, active);
        token.safeTransferFrom(from, address(this), amount);
    }

    // ------------------------------------------------------------------- unbond

    /// @inheritdoc IStakeVault
    function requestUnbond(uint256 amount) external {
        require(amount != 0, VaultZeroAmount());
        _unbond(msg.sender, amount);
        workers.jailForLowStake(msg.sender);
    }

    /// @inheritdoc IStakeVault
    function requestUnbondFor(address worker) external only(address(workers)) {
        uint256 active = _accounts[worker].active;
        if (active != 0) _unbond(worker, active);
    }

    function _unbond(address owner, uint256 amount) private {
        Account storage account = _accounts[owner];
        uint256 active = account.active;
        require(amount <= active, VaultInsufficientStake(owner, amount, active));
        uint256 unbonding = account.unbonding + amount;
        uint256 withdrawableAt = block.timestamp + unbondingPeriod;
        account.active = (active - amount).toUint128();
        account.unbonding = unbonding.toUint128();
        account.withdrawableAt = withdrawableAt.toUint64();
        emit UnbondRequested(owner, amount, unbonding, withdrawableAt);
    }

    /// @inheritdoc IStakeVault
    function withdraw() external returns (uint256 amount) {
        Account storage account = _accounts[msg.sender];
        amount = account.unbonding;
        uint256 withdrawableAt = account.withdrawableAt;
        require(
            amount != 0 && block.timestamp >= withdrawableAt, VaultNotWithdrawable(msg.sender, amount, withdrawableAt)
        );
        // Holds are bounded, so that nobody can keep stake for ever by opening case after case.
        (uint256 openCases, uint256 heldUntil) = (account.openCases, account.heldUntil);
        require(
            (openCases == 0 && block.timestamp >= heldUntil) || block.timestamp >= withdrawableAt + unbondingPeriod,
            VaultStakeHeld(msg.sender, openCases, heldUntil)
        );
        account.unbonding = 0;
        account.withdrawableAt = 0;
        emit Withdrawn(msg.sender, amount);
        token.safeTransfer(msg.sender, amount);
    }

    // --------------------------------------------------------------------- hold

    /// @inheritdoc IStakeVault
    function hold(address owner, uint256 until) external onlySlasher {
        Account storage account = _accounts[owner];
        if (until <= account.heldUntil) return;
        account.heldUntil = until.toUint64();
        emit StakeHeld(owner, until, account.openCases);
    }

    /// @inheritdoc IStakeVault
    function openCase(address owner) external only(address(court)) {
        Account storage account = _accounts[owner];
        emit StakeHeld(owner, account.heldUntil, ++account.openCases);
    }

    /// @inheritdoc IStakeVault
    function closeCase(address owner) external only(address(court)) {
        Account storage account = _accounts[owner];
        emit StakeHeld(owner, account.heldUntil, --account.openCases);
    }

    // -------------------------------------------------------------------- slash

    /// @inheritdoc IStakeVault
    function slash(address owner, uint256 ppm, bytes32 offence, address reporter)
        external
        onlySlasher
        returns (uint256 amount)
    {
        require(ppm <= PPM, VaultInvalidShares(ppm));
        StoredEscrow storage escrow = _escrows[offence];
        require(escrow.status == EscrowStatus.None, VaultOffenceSettled(offence));
        Account storage account = _accounts[owner];
        (uint256 active, uint256 unbonding) = (account.active, account.unbonding);
        uint256 fromActive = Math.ceilDiv(active * ppm, PPM);
        uint256 fromUnbonding = Math.ceilDiv(unbonding * ppm, PPM);
        amount = fromActive + fromUnbonding;

        account.active = (active - fromActive).toUint128();
        account.unbonding = (unbonding - fromUnbonding).toUint128();
        escrow.owner = owner;
        escrow.amount = amount.toUint88();
        escrow.status = EscrowStatus.Held;
        if (reporter != address(0)) escrow.reporter = reporter;
        emit Slashed(owner, offence, fromActive, fromUnbonding, reporter);
        workers.jailForLowStake(owner);
    }

    /// @inheritdoc IStakeVault
    function release(bytes32 offence) external onlySlasher {
        StoredEscrow storage escrow = _heldEscrow(offence);
        (uint256 amount, address reporter) = (escrow.amount, escrow.reporter);
        uint256 insured = amount * insurancePpm / PPM;
        uint256 rewarded = reporter == address(0) ? 0 : Math.min(amount * reporterPpm / PPM, reporterCap);
        uint256 burned = amount - insured - rewarded;

        escrow.status = EscrowStatus.Released;
        emit SlashReleased(offence, burned, insured, rewarded);
        token.burn(burned);
        if (insured != 0) token.safeTransfer(insurance, insured);
        if (rewarded != 0) token.safeTransfer(reporter, rewarded);
    }

    /// @inheritdoc IStakeVault
    function restore(bytes32 offence) external onlySlasher {
        StoredEscrow storage escrow = _heldEscrow(offence);
        (address owner, uint256 amount) = (escrow.owner, escrow.amount);
        escrow.status = EscrowStatus.Restored;
        Account storage account = _accounts[owner];
        account.active = (account.active + amount).toUint128();
        emit SlashRestored(owner, offence, amount);
    }

    function _heldEscrow(bytes32 offence) private view returns (StoredEscrow storage escrow) {
        escrow = _escrows[offence];
        require(escrow.status == EscrowStatus.Held, VaultOffenceSettled(offence));
    }

    // -------------------------------------------------------------------- views

    /// @inheritdoc IStakeVault
    function accountOf(address owner) external view returns (Account memory) {
        return _accounts[owner];
    }

    /// @inheritdoc IStakeVault
    function activeStake(address owner) external view returns (uint256) {
        return _accounts[owner].active;
    }

    /// @inheritdoc IStakeVault
    function escrowOf(bytes32 offence) external view returns (Escrow memory) {
        StoredEscrow storage escrow = _escrows[offence];
        return Escrow({owner: escrow.owner, reporter: escrow.reporter, amount: escrow.amount, status: escrow.status});
    }
}
