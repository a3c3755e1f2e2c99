// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {IRewardEscrow} from "../../src/interfaces/IRewardEscrow.sol";
import {Handler} from "./Handler.sol";
import {Hostile} from "./Hostile.sol";
import {Replica} from "./Replica.sol";

/// @title What holds after any sequence of actions
contract NetworkInvariants is Test {
    uint256 private constant SUPPLY = 1_000_000_000 ether;
    uint256 private constant CHALLENGE_BOND = 50 ether;

    Hostile private _life;
    Replica private _replica;

    function setUp() public {
        _life = new Hostile();
        _replica = _life.replica();
        bytes4[] memory selectors = new bytes4[](21);
        selectors[0] = Handler.deposit.selector;
        selectors[1] = Handler.requestUnbond.selector;
        selectors[2] = Handler.withdraw.selector;
        selectors[3] = Handler.exit.selector;
        selectors[4] = Handler.comeBack.selector;
        selectors[5] = Handler.submitDirect.selector;
        selectors[6] = Handler.commit.selector;
        selectors[7] = Handler.post.selector;
        selectors[8] = Handler.executeFraud.selector;
        selectors[9] = Handler.finaliseFraud.selector;
        selectors[10] = Handler.challenge.selector;
        selectors[11] = Handler.hear.selector;
        selectors[12] = Handler.punish.selector;
        selectors[13] = Handler.slashOverdue.selector;
        selectors[14] = Handler.claim.selector;
        selectors[15] = Handler.recover.selector;
        selectors[16] = Handler.changeTerms.selector;
        selectors[17] = Handler.publish.selector;
        selectors[18] = Handler.pass.selector;
        selectors[19] = Hostile.attack.selector;
        selectors[20] = Handler.pauseSlashing.selector;
        targetSelector(FuzzSelector({addr: address(_life), selectors: selectors}));
        targetContract(address(_life));
    }

    function _assertNever(string memory sin) private view {
        assertEq(_life.sins(sin), 0, sin);
    }

    /// @dev The vault holds exactly what it owes: active and unbonding stake of everybody, and held escrows.
    function invariant_vaultHoldsWhatItOwes() public view {
        (uint256 holds,,,) = _life.balances();
        assertEq(holds, _replica.owedByVault(), "balance");
    }

    /// @dev The escrow holds exactly what its runs have free and set aside; paid ≤ ever reserved ≤ funded.
    function invariant_escrowHoldsWhatItOwes() public view {
        (, uint256 holds,,) = _life.balances();
        IRewardEscrow.Funds memory funds = _life.funds();
        assertEq(holds, uint256(funds.available) + funds.reserved, "balance");
        assertEq(holds, _replica.funded() - _replica.paid(), "all that came in and did not go out");
        assertLe(_replica.paid() + funds.reserved, _replica.everReserved(), "paid or set aside: reserved before");
    }

    /// @dev The court holds the bonds of open cases and nothing else.
    function invariant_courtHoldsOpenBonds() public view {
        (,, uint256 holds,) = _life.balances();
        assertEq(holds, _replica.openCases() * CHALLENGE_BOND, "bonds");
        assertEq(_life.openCasesHeld(), _replica.openCases(), "each open case holds one stake");
    }

    /// @dev Tokens leave the supply only as burned shares of slashes and as bonds of lost cases.
    function invariant_burnsAreAccountedFor() public view {
        (,,, uint256 supply) = _life.balances();
        uint256 burnedBonds = SUPPLY - supply - _replica.burned();
        assertEq(burnedBonds % CHALLENGE_BOND, 0, "whole bonds");
        assertLe(burnedBonds, _replica.caseCount() * CHALLENGE_BOND, "of closed cases");
    }

    /// @dev A slot is paid at most once, whatever batches it is in; only what is final and accepted is paid, at the
    ///      price of its commitment; and all of that is paid.
    function invariant_paymentsFollowTheRules() public view {
        _assertNever("paid a slot twice");
        _assertNever("paid what is not final or not accepted");
        _assertNever("paid more than promised");
        _assertNever("refused what is due");
        _assertNever("recovered what is not final or accepted");
    }

    /// @dev A slash takes no more than there is, once for each file, and nothing from anybody else.
    function invariant_slashesFollowTheRules() public view {
        _assertNever("slashed more than there is");
        _assertNever("slashed what is no fraud, or twice");
        _assertNever("could not execute a fraud");
        _assertNever("touched another's stake");
    }

    /// @dev Escrows are released when final, not before, and never twice.
    function invariant_escrowsSettleOnce() public view {
        _assertNever("released an escrow before the time");
        _assertNever("could not finalise a fraud");
    }

    /// @dev Stake leaves when its clock is over and nothing holds it, and never while work it stood behind is not
    ///      final; nothing can keep it for longer than one more unbonding period.
    function invariant_stakeStaysBehindUnfinalisedWork() public view {
        _assertNever("withdrew before the time");
        _assertNever("withdrew stake behind unfinalised work");
        _assertNever("could not withdraw");
    }

    /// @dev A pause of slashing delays an execution and saves nobody: the stake is still there afterwards.
    function invariant_pausesSaveNobody() public view {
        _assertNever("withdrew what a pause alone kept from a slash");
        _assertNever("slashed while slashing was paused");
    }

    /// @dev Pauses last as long as they may, with breaks between them, and open nothing that was final.
    function invariant_pausesAreBounded() public view {
        _assertNever("slashing paused for too long");
        _assertNever("paused slashing too soon again");
        _assertNever("could not pause slashing");
        _assertNever("what was final is open again");
    }

    /// @dev Only active workers submit directly, and active workers hold the required stake.
    function invariant_onlyStakedWorkersSubmit() public view {
        _assertNever("submitted though not active");
        assertEq(_life.activeBelowRequirement(), 0, "active below the requirement");
    }

    /// @dev Convictions are those executed less those acquitted; a ban needs one, two need a ban.
    function invariant_convictionsAreCounted() public view {
        assertEq(_life.convictions(), _replica.convictions(), "executed less acquitted");
        assertEq(_life.wrongBans(), 0, "bans");
    }

    /// @dev No event contradicts those before it; every split of a slash adds up to its amount.
    function invariant_eventsAreConsistent() public view {
        assertEq(_replica.contradictions(), 0, _replica.contradiction());
    }

    /// @dev Every call either reverts or emits what rebuilds the state.
    function invariant_eventsRebuildTheState() public view {
        assertEq(_life.differences(), 0, "differences");
    }

    /// @dev Nobody has a power that is not its own.
    function invariant_hostileMovesFail() public view {
        _assertNever("a hostile move succeeded");
    }

    /// @dev An invariant over states that are never reached proves nothing.
    function test_handler_reachesEveryState() public {
        for (uint256 i = 0; i < 1500; ++i) {
            _act(uint256(keccak256(abi.encode("life", i))));
        }
        bytes32[19] memory actions = [
            bytes32("withdraw"),
            "exit",
            "unjail",
            "rejoin",
            "submitDirect",
            "executeFraud",
            "finaliseFraud",
            "challenge",
            "overturn",
            "uphold",
            "slashAbsentJuror",
            "slashSigner",
            "slashOverdue",
            "claim",
            "recover",
            "applyChange",
            "attack",
            "pauseSlashing",
            "wait"
        ];
        for (uint256 i = 0; i < actions.length; ++i) {
            assertGt(_life.reached(actions[i]), 0, string(abi.encodePacked(actions[i])));
        }
        _assertAllHolds();
    }

    function _assertAllHolds() private view {
        invariant_vaultHoldsWhatItOwes();
        invariant_escrowHoldsWhatItOwes();
        invariant_courtHoldsOpenBonds();
        invariant_burnsAreAccountedFor();
        invariant_paymentsFollowTheRules();
        invariant_slashesFollowTheRules();
        invariant_escrowsSettleOnce();
        invariant_stakeStaysBehindUnfinalisedWork();
        invariant_pausesSaveNobody();
        invariant_pausesAreBounded();
        invariant_onlyStakedWorkersSubmit();
        invariant_convictionsAreCounted();
        invariant_eventsAreConsistent();
        invariant_eventsRebuildTheState();
        invariant_hostileMovesFail();
    }

    function _act(uint256 seed) private {
        uint256 a = seed >> 16;
        uint256 b = seed >> 128;
        uint256 action = seed % 31;
        if (action < 2) _life.commit(a);
        else if (action < 3) _life.post(a, b);
        else if (action < 6) _life.executeFraud(a);
        else if (action < 9) _life.challenge(a, uint8(b));
        else if (action < 11) _life.hear(a, b);
        else if (action < 13) _life.punish(a);
        else if (action < 14) _life.slashOverdue(a, b);
        else if (action < 17) _life.claim(a);
        else if (action < 19) _life.finaliseFraud(a);
        else if (action < 20) _life.recover(a);
        else if (action < 21) _life.pass(a);
        else if (action < 22) _life.withdraw(a);
        else if (action < 23) _life.requestUnbond(a, b);
        else if (action < 24) _life.deposit(a, b);
        else if (action < 26) _life.comeBack(a);
        else if (action < 27) _life.exit(a);
        else if (action < 28) _life.submitDirect(a);
        else if (action < 29) _life.changeTerms(a);
        else if (action < 30) _life.attack(a, b, seed >> 200);
        else _life.pauseSlashing(a, uint8(b), uint8(b >> 8));
    }
}
