// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.30;

import {Test} from "forge-std/Test.sol";

import {MusterToken} from "../../src/MusterToken.sol";
import {NetworkFactory} from "../../src/NetworkFactory.sol";
import {StakeVault} from "../../src/StakeVault.sol";
import {IContributionLedger} from "../../src/interfaces/IContributionLedger.sol";
import {INetworkFactory} from "../../src/interfaces/INetworkFactory.sol";

/// @dev A contract whose constructor has the factory create a second one.
contract Greedy {
    constructor(INetworkFactory factory, address expected, bytes memory code) {
        factory.create(expected, code);
    }
}

/// @dev Knows who made it, and with what.
contract Child {
    address public immutable maker = msg.sender;
    uint256 public immutable number;

    constructor(uint256 number_) {
        number = number_;
    }
}

/// @title The factory makes contracts for its account only, one after the other
contract NetworkFactoryTest is Test {
    /// @dev What the deterministic deployment proxy is on every chain.
    bytes private constant PROXY_CODE =
        hex"7fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffe03601600081602082378035828234f58015156039578182fd5b8082525050506014600cf3";

    address private account = makeAddr("account");
    address private stranger = makeAddr("stranger");
    NetworkFactory private factory;

    function setUp() public {
        factory = new NetworkFactory(account);
    }

    function _child(uint256 number) private pure returns (bytes memory) {
        return bytes.concat(type(Child).creationCode, abi.encode(number));
    }

    function _at(uint256 place) private view returns (address) {
        return vm.computeCreateAddress(address(factory), place);
    }

    // ------------------------------------------------------------------- create

    function testFuzz_create_reverts_forStrangers(address caller, uint256 number) public {
        vm.assume(caller != account);
        vm.expectRevert(abi.encodeWithSelector(INetworkFactory.FactoryUnauthorized.selector, caller));
        vm.prank(caller);
        factory.create(_at(1), _child(number));
        assertEq(vm.getNonce(address(factory)), 1, "nothing was created");
    }

    function testFuzz_create_reverts_whenSentTwice(uint256 number) public {
        vm.startPrank(account);
        factory.create(_at(1), _child(number));
        vm.expectRevert(abi.encodeWithSelector(INetworkFactory.FactoryTaken.selector, _at(1)));
        factory.create(_at(1), _child(number));
        assertEq(vm.getNonce(address(factory)), 2, "one was created");
    }

    function testFuzz_create_reverts_outOfOrder(uint256 place) public {
        place = bound(place, 2, type(uint64).max - 1);
        vm.expectRevert(abi.encodeWithSelector(INetworkFactory.FactoryOutOfOrder.selector, _at(1), _at(place)));
        vm.prank(account);
        factory.create(_at(place), _child(place));
        assertEq(vm.getNonce(address(factory)), 1, "nothing was created");
        assertEq(_at(1).code.length, 0, "nor does the next place hold anything");
    }

    function test_create_reverts_withWhatTheConstructorSays() public {
        vm.mockCallRevert(address(7), abi.encodeWithSignature("judgementTime()"), "no ledger");
        StakeVault.Network memory network;
        network.ledger = IContributionLedger(address(7));
        bytes memory code = bytes.concat(
            type(StakeVault).creationCode, abi.encode(address(0), network, address(0), uint256(1), 0, 0, 0)
        );
        vm.expectRevert("no ledger");
        vm.prank(account);
        factory.create(_at(1), code);
    }

    function test_create_reverts_whenAConstructorCreatesMore() public {
        address inner = vm.computeCreateAddress(address(factory), 2);
        bytes memory code = bytes.concat(type(Greedy).creationCode, abi.encode(address(factory), inner, _child(1)));
        vm.expectRevert(abi.encodeWithSelector(INetworkFactory.FactoryUnauthorized.selector, _at(1)));
        vm.prank(account);
        factory.create(_at(1), code);
    }

    function testFuzz_create_makesOneAfterTheOther(uint256 first, uint256 second) public {
        uint256[2] memory numbers = [first, second];
        for (uint256 i = 0; i < 2; ++i) {
            vm.expectEmit(address(factory));
            emit INetworkFactory.ContractCreated(_at(i + 1));
            vm.prank(account);
            factory.create(_at(i + 1), _child(numbers[i]));
            assertEq(Child(_at(i + 1)).number(), numbers[i], "arguments");
            assertEq(Child(_at(i + 1)).maker(), address(factory), "maker");
        }
    }

    function test_create_givesTheSupplyToTheOwner() public {
        address owner = makeAddr("owner");
        vm.prank(account);
        factory.create(_at(1), bytes.concat(type(MusterToken).creationCode, abi.encode(5 ether, owner)));
        assertEq(MusterToken(_at(1)).balanceOf(owner), 5 ether, "owner");
        assertEq(MusterToken(_at(1)).balanceOf(address(factory)), 0, "factory");
    }

    // --------------------------------------------------------------- construction

    function testFuzz_constructor_isTheSameWhoeverCallsTheProxy(address caller, bytes32 salt) public {
        vm.etch(CREATE2_FACTORY, PROXY_CODE);
        vm.roll(77);
        bytes memory code = bytes.concat(type(NetworkFactory).creationCode, abi.encode(account));
        vm.prank(caller);
        (bool succeeded, bytes memory returned) = CREATE2_FACTORY.call(bytes.concat(salt, code));
        assertTrue(succeeded, "made");
        NetworkFactory made = NetworkFactory(address(bytes20(returned)));
        assertEq(address(made), vm.computeCreate2Address(salt, keccak256(code), CREATE2_FACTORY), "address");
        assertEq(made.account(), account, "account");
        assertEq(made.startBlock(), 77, "block");
        vm.prank(stranger);
        (succeeded,) = CREATE2_FACTORY.call(bytes.concat(salt, code));
        assertFalse(succeeded, "a second one at the same address");
    }
}
