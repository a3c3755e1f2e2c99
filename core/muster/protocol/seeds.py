"""Derives a worker's task from its ticket: parts, problems, target lengths, sampling seeds.

Nobody can choose any of these: the beacon is a block hash that did not exist when the worker chose
its address. Solidity and Python share the golden vectors of `tests/conformance/vectors/seeds.json`.
"""

from collections import Counter
from collections.abc import Container, Sequence
from enum import IntEnum

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, RunId, Step


class Purpose(IntEnum):
    """Separates the streams drawn from one seed."""

    PROBLEM = 0
    TARGET_LENGTH = 1
    SAMPLE = 2
    PART = 3
    REVISIT = 4


def ticket_seed(run_id: RunId, beacon: Hash32, worker: Address, step: Step, index: int) -> Hash32:
    """Return `keccak256(abi.encode(runId, beacon, worker, step, index))`."""
    return keccak(abi_words(run_id, beacon, address_bytes(worker), step, index))


def draw(seed: Hash32, purpose: Purpose, counter: int) -> int:
    """Return the `counter`-th 64-bit integer of one stream: the first 8 bytes, big-endian, of
    `keccak256(abi.encode(seed, purpose, counter))`.
    """
    return int.from_bytes(keccak(abi_words(seed, purpose, counter))[:8], "big")


def problem_indices(seed: Hash32, count: int, task_set_size: int) -> list[int]:
    """Return `count` distinct indices below `task_set_size`, in the order drawn.

    Raises EncodingError when the set holds fewer than `count` problems.
    """
    return mixed_indices(seed, [range(task_set_size)] * count)


def mixed_indices(
    seed: Hash32,
    parts: Sequence[range],
    set_aside: Container[int] = (),
    revisit: Sequence[int] = (),
) -> list[int]:
    """Return one index of each range, all distinct, in this order. Two ranges must be equal or
    disjoint.

    Draws modulo the length and skips repeats; the bias is below 2^-32 for sets under 2^32 problems.
    Problem j skips indices that are set aside, unless `revisits` is true for `revisit[j]`; without
    `revisit` no problem skips any. A valid list (`muster.protocol.set_aside`) leaves enough to
    draw. Raises EncodingError when a range has fewer indices than occurrences in `parts`.
    """
    for part, count in Counter(parts).items():
        if count > len(part):
            raise EncodingError(f"cannot draw {count} problems from a set of {len(part)}")
    skips = [not revisits(seed, j, every) for j, every in enumerate(revisit)]
    chosen: dict[int, None] = {}
    counter = 0
    while len(chosen) < len(parts):
        place = len(chosen)
        part = parts[place]
        index = part.start + draw(seed, Purpose.PROBLEM, counter) % len(part)
        if not (skips and skips[place] and index in set_aside):
            chosen[index] = None
        counter += 1
    return list(chosen)


def revisits(seed: Hash32, problem: int, every: int) -> bool:
    """Tell whether the ticket's `problem`-th problem may be one that is set aside: one in `every`
    may; if `every` is 0, all may.
    """
    return not every or draw(seed, Purpose.REVISIT, problem) % every == 0


def part_of(seed: Hash32, problem: int, weights: Sequence[int]) -> int:
    """Return the number of the mixture's part that the ticket's `problem`-th problem comes from.

    Draws modulo the sum of the weights, which are not negative and not all 0; the bias is below
    2^-40 for sums under 2^24.
    """
    place = draw(seed, Purpose.PART, problem) % sum(weights)
    part = 0
    while place >= weights[part]:
        place -= weights[part]
        part += 1
    return part


def target_length(seed: Hash32, problem: int, lengths: Sequence[int]) -> int:
    """Return the budget of the ticket's `problem`-th problem in tokens, -1 without budgets."""
    if not lengths:
        return -1
    return lengths[draw(seed, Purpose.TARGET_LENGTH, problem) % len(lengths)]


def sample_seed(seed: Hash32, problem: int, sample: int, samples_per_problem: int) -> int:
    """Return the 64-bit sampling seed of one sample of the ticket's `problem`-th problem."""
    return draw(seed, Purpose.SAMPLE, problem * samples_per_problem + sample)
