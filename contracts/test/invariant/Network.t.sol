// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {Handler} from "./Handler.sol";
import {Hostile} from "./Hostile.sol";
import {Replica} from "./Replica.sol";

/// @title What holds after any sequence of actions of honest and hostile parties in two runs
contract NetworkInvariants is Test {
    Hostile private _life;
    Replica private _replica;

    function setUp() public {
        _life = new Hostile();
        _replica = _life.replica();
        bytes4[28] memory actions = [
            Handler.deposit.selector,
            Handler.requestUnbond.selector,
            Handler.withdraw.selector,
            Handler.leave.selector,
            Handler.dismiss.selector,
            Handler.comeBack.selector,
            Handler.commit.selector,
            // Without work there is nothing to see: twice as often.
            Handler.commit.selector,
            Handler.answer.selector,
            Handler.submitDirect.selector,
            Handler.appeal.selector,
            Handler.voidBatch.selector,
            Handler.returnBond.selector,
            Handler.executeFraud.selector,
            Handler.finaliseFraud.selector,
            Handler.challenge.selector,
            Handler.hear.selector,
            Handler.punish.selector,
            Handler.equivocate.selector,
            Handler.claim.selector,
            Handler.recover.selector,
            Handler.fund.selector,
            Handler.closeRun.selector,
            Handler.reclaim.selector,
            Handler.changeTerms.selector,
            Handler.pauseSlashing.selector,
            Handler.pass.selector,
            Hostile.attack.selector
        ];
        bytes4[] memory selectors = new bytes4[](actions.length);
        for (uint256 i = 0; i < actions.length; ++i) {
            selectors[i] = actions[i];
        }
        targetSelector(FuzzSelector({addr: address(_life), selectors: selectors}));
        targetContract(address(_life));
    }

    function _assertNever(string memory sin) private view {
        assertEq(_life.sins(sin), 0, sin);
    }

    /// @dev An action whose success the rules foretell succeeds exactly then.
    function _assertExactly(string memory action) private view {
        _assertNever(string.concat("could ", action));
        _assertNever(string.concat("could not ", action));
    }

    // ------------------------------------------------------------------ the laws

    /// @dev Each call moves the stake of one account in one run at most, and what a run decides moves none of another
    ///      run: no event takes stake for what happened elsewhere, and events rebuild all stakes.
    function invariant_stakeFallsOnlyByItsOwnRun() public view {
        _assertNever("touched another's stake");
        _assertNever("a fraud cost something else");
        assertEq(_replica.contradictions(), 0, _replica.contradiction());
        assertEq(_life.differences(), 0, "events do not rebuild the state");
    }

    /// @dev Only units are paid that a quorum of the run or the network's jury accepted, at the price of their
    ///      commitment; and all of those are.
    function invariant_onlyAcceptedUnitsArePaid() public view {
        for (uint64 run = 1; run <= 2; ++run) {
            assertLe(_replica.paid(run), _life.acceptedValue(run), "paid, accepted");
            assertLe(_replica.paid(run), _replica.everReserved(run), "paid, set aside before");
        }
        _assertNever("paid something else than the price");
        _assertExactly("claim");
        _assertExactly("recover");
    }

    /// @dev A fraud that stands costs its worker what the terms say, and can be executed until then; one that is
    ///      overturned leaves the stake as if it had never been.
    function invariant_fraudsCostAndAcquittalsRestore() public view {
        assertEq(_life.stakesHurtByAcquitted(), 0, "not as if the overturned had never been");
        _assertExactly("executeFraud");
        _assertExactly("finaliseFraud");
        _assertNever("withdrew what a known fraud costs");
        assertEq(_life.wrongBans(), 0, "bans");
    }

    /// @dev Whoever follows its client loses no stake, whatever run it is in and whoever owns that.
    function invariant_honestPartiesLoseNothing() public view {
        assertEq(_life.lostByHonest(), 0, "lost");
        _assertNever("an honest worker had no case");
        _assertNever("an honest worker's slash is final");
        _assertExactly("doubleOutcome");
        _assertExactly("doubleSubmission");
        _assertExactly("fineSigner");
        _assertExactly("fineAbsentJuror");
    }

    /// @dev With an honest majority on the bench the court finds the truth, and in time.
    function invariant_courtFindsTheTruthInTime() public view {
        _assertNever("the court was wrong");
        _assertNever("a judgement was forged");
        _assertNever("no jury of three");
        assertEq(_life.overdueCases(), 0, "cases open for too long");
        _assertExactly("claimRuling");
        _assertExactly("summon");
        _assertExactly("settle");
        _assertExactly("splitOff");
    }

    /// @dev Stake leaves when one unbonding period is over, and not before; everybody can leave its role at any time.
    function invariant_exitTakesOneUnbondingPeriod() public view {
        _assertExactly("withdraw");
        _assertExactly("unbond");
        _assertExactly("exit");
        _assertExactly("leaveSeat");
        _assertExactly("leaveBench");
        _assertExactly("dismiss");
    }

    /// @dev The vault holds stakes and escrows, the escrow what runs have, the court bonds and fees: nothing more or
    ///      less.
    function invariant_fundsNeverStick() public view {
        (uint256 ofVault, uint256 ofEscrow, uint256 ofCourt) = _life.balances();
        assertEq(ofVault, _replica.staked() + _replica.heldInEscrow(), "vault");
        assertEq(ofEscrow, _life.owedByEscrow(), "escrow");
        assertEq(ofCourt, _replica.owedByCourt(), "court");
        _assertExactly("returnBond");
        _assertExactly("voidBatch");
        _assertExactly("collectFee");
        _assertExactly("reclaim");
    }

    /// @dev Of a judged batch nothing stays set aside but what its records hold, and nothing of that once it was claimed or
    ///      recovered.
    function invariant_onlyWhatMayBePaidIsSetAside() public view {
        for (uint64 run = 1; run <= 2; ++run) {
            if (!_life.isReclaimable(run)) {
                assertEq(_replica.fundsOf(run).reserved, _life.dueReserve(run), "set aside");
            }
        }
    }

    /// @dev A slot is paid once, whatever batches it is in.
    function invariant_slotsArePaidOnce() public view {
        _assertNever("paid a slot twice");
    }

    // -------------------------------------------------------------------- the rest

    /// @dev Who works, validates or judges holds the stake for it; who lacks it, or is away, comes back with it.
    function invariant_rolesHoldTheirStake() public view {
        assertEq(_life.rolesWithoutStake(), 0, "roles without stake");
        _assertExactly("submitDirect");
        _assertExactly("comeBack");
        _assertExactly("takeSeat");
        _assertExactly("joinBench");
    }

    /// @dev Pauses last as long as they may, with breaks between them.
    function invariant_pausesAreBounded() public view {
        _assertNever("slashing paused for too long");
        _assertExactly("pauseSlashing");
    }

    /// @dev Nobody has a power that is not its own.
    function invariant_hostileMovesFail() public view {
        _assertNever("a hostile move succeeded");
        _assertExactly("closeRun");
        _assertExactly("deposit");
        _assertExactly("fund");
        _assertExactly("post");
        _assertExactly("withhold");
    }

    // ------------------------------------------------------------------------- end

    /// @dev After any life, everybody gets what is its own, and no contract keeps a token.
    function afterInvariant() public {
        _life.end();
        _assertAllHolds();
        (uint256 ofVault, uint256 ofEscrow, uint256 ofCourt) = _life.balances();
        assertEq(ofVault, 0, "left in the vault");
        assertEq(ofEscrow, 0, "left in the escrow");
        assertEq(ofCourt, 0, "left in the court");
    }

    /// @dev An invariant over states that are never reached proves nothing.
    function test_life_reachesEveryState() public {
        vm.pauseGasMetering();
        for (uint256 i = 0; i < 2000; ++i) {
            _act(uint256(keccak256(abi.encode("life", i))));
        }
        _assertAllHolds();
        _assertReached();
        afterInvariant();
        assertGt(_life.reached("reclaim"), 0, "reclaim");
    }

    function _assertReached() private view {
        bytes32[34] memory actions = [
            bytes32("withdraw"),
            "unbond",
            "exit",
            "leaveSeat",
            "leaveBench",
            "dismiss",
            "comeBack",
            "takeSeat",
            "joinBench",
            "commit",
            "post",
            "withhold",
            "submitDirect",
            "splitOff",
            "summon",
            "judge",
            "voidBatch",
            "returnBond",
            "claimRuling",
            "overturn",
            "uphold",
            "executeFraud",
            "executeWrongFraud",
            "finaliseFraud",
            "collectFee",
            "fineSigner",
            "fineAbsentJuror",
            "claim",
            "recover",
            "pauseSlashing",
            "doubleOutcome",
            "doubleSubmission",
            "applyChange",
            "attack"
        ];
        for (uint256 i = 0; i < actions.length; ++i) {
            assertGt(_life.reached(actions[i]), 0, string(abi.encodePacked(actions[i])));
        }
    }

    function _assertAllHolds() private view {
        invariant_stakeFallsOnlyByItsOwnRun();
        invariant_onlyAcceptedUnitsArePaid();
        invariant_fraudsCostAndAcquittalsRestore();
        invariant_honestPartiesLoseNothing();
        invariant_courtFindsTheTruthInTime();
        invariant_exitTakesOneUnbondingPeriod();
        invariant_fundsNeverStick();
        invariant_onlyWhatMayBePaidIsSetAside();
        invariant_slotsArePaidOnce();
        invariant_rolesHoldTheirStake();
        invariant_pausesAreBounded();
        invariant_hostileMovesFail();
    }

    /// @dev As the fuzzer acts, with more of what work needs.
    function _act(uint256 seed) private {
        uint256 a = seed >> 16;
        uint256 b = seed >> 128;
        uint256 action = seed % 44;
        if (action < 4) _life.commit(a);
        else if (action < 5) _life.answer(a, b);
        else if (action < 7) _life.submitDirect(a);
        else if (action < 8) _life.appeal(a);
        else if (action < 10) _life.voidBatch(a);
        else if (action < 12) _life.returnBond(a);
        else if (action < 14) _life.executeFraud(a);
        else if (action < 16) _life.finaliseFraud(a);
        else if (action < 19) _life.challenge(a, b);
        else if (action < 20) _life.hear(a);
        else if (action < 22) _life.punish(a);
        else if (action < 24) _life.claim(a);
        else if (action < 26) _life.recover(a);
        else if (action < 29) _life.pass(a);
        else if (action < 32) _life.comeBack(a);
        else _actSeldom(action, a, b);
    }

    function _actSeldom(uint256 action, uint256 a, uint256 b) private {
        if (action < 33) _life.deposit(a, a >> 8, b);
        else if (action < 34) _life.requestUnbond(a, b);
        else if (action < 36) _life.withdraw(a);
        else if (action < 37) _life.leave(a);
        else if (action < 38) _life.dismiss(a);
        else if (action < 39) _life.equivocate(a, b);
        else if (action < 40) _life.fund(a, b);
        else if (action < 42) _life.changeTerms(a);
        else if (action < 43) _life.pauseSlashing(a);
        else _life.attack(a, b, a >> 64);
    }
}
