"""The hostile second run: fifteen attacks by the owner of a run on the same contracts.

Forge plays each (`contracts/test/unit/AttacksByRuns.t.sol`, tests `test_R1_…` to `test_R15_…`).
Nothing is random, so each defence holds or not. This module describes the attacks and their
outcomes.
"""

from dataclasses import dataclass

from muster.lab.redteam.contracts import results_of


@dataclass(frozen=True, slots=True)
class Play:
    """One of the fifteen."""

    number: int
    """1 to 15."""
    title: str
    """What the attacker does."""
    now: str
    """What happens."""

    @property
    def tests(self) -> str:
        """Prefix of the names of its tests."""
        return f"test_R{self.number}_"


PLAYS = (
    Play(
        1,
        "seats strangers as validators and has them punished for silence",
        "nobody is seated who did not take the seat; silence costs no validator anything",
    ),
    Play(
        2,
        "has an accomplice's run convict a cheat first, to shelter its stake",
        "stake is of one run; within one, what comes back pays later offences first",
    ),
    Play(3, "submits garbage whose body nobody can have", "work that nobody judged is void"),
    Play(
        4,
        "opens a case with another wrong claim, so that jurors uphold the fraud",
        "jurors vote a ruling, whatever was claimed; the wrong claimant loses its bond",
    ),
    Play(5, "does so about its own accepted fraud", "the jury's ruling stands, and it is slashed"),
    Play(
        6,
        "has a withheld second batch of the same file rejected, to undo a slash",
        "an escrow is of one outcome: a case about another restores nothing",
    ),
    Play(
        7,
        "hides files from validators and shows them to jurors",
        "nobody pays for having said that a file could not be had",
    ),
    Play(8, "withholds a batch of invented work", "it is void: the run pays nothing for it"),
    Play(
        9,
        "signs twice with a node key that was rotated away",
        "a key answers for what was committed while it served",
    ),
    Play(10, "submits work of zero units, without end", "refused; direct work has a bond"),
    Play(
        11,
        "reorders seats after the draw's block is known",
        "jurors are of the bench as it was when the case opened, and never a party",
    ),
    Play(
        12,
        "convicts a worker in a run whose slashes are nothing",
        "convictions, jail and ban are of one run, and only of who joined it",
    ),
    Play(
        13,
        "frames an honest worker of its own run for the reporter's share",
        "no reporter for what a run's validators found; a jury gives the stake back",
    ),
    Play(
        14,
        "reserves a run's funds, holds withdrawals by cases, overtakes claims",
        "direct work needs a ticket, a case the worker's signature; nothing holds stake; claims "
        "are announced",
    ),
    Play(
        15,
        "swallows validators' signatures, shows them no work",
        "signatures are shown on chain, anybody posts them; judges of the network see the work",
    ),
)


def play() -> dict[int, bool]:
    """Return whether all tests of each attack held; False for one without a test."""
    results = results_of(tuple(f"{each.tests}.*" for each in PLAYS))
    found = {}
    for each in PLAYS:
        own = [held for name, (held, _) in results.items() if name.startswith(each.tests)]
        found[each.number] = bool(own) and all(own)
    return found


def failures(held: dict[int, bool]) -> list[str]:
    """Return the defences that failed, in words."""
    return [f"R{each.number}: {each.title}" for each in PLAYS if not held[each.number]]


def table() -> str:
    """Return the page's part about these attacks."""
    lines = [
        "## A hostile run on the same contracts",
        "",
        "Whoever owns a run, with its own orchestrator, validators, workers and capital, against",
        "everybody else (`contracts/test/unit/AttacksByRuns.t.sol`). Each is played, not drawn.",
        "",
        "| | the owner of a second run … | what happens |",
        "|---|---|---|",
    ]
    lines += [f"| R{each.number} | {each.title} | {each.now} |" for each in PLAYS]
    return "\n".join(lines) + "\n"
