"""The profit of misjudging: lazy, colluding and extorting validators, jurors, false accusers.

The judges' side of `muster.protocol.economics`; pure, amounts in wei. Validators are not paid by
the protocol and never get a share of what they slash, so all that they can gain is what they save
or are bribed with.
"""

from dataclasses import dataclass

from muster.protocol.economics import MAX_STAKE, PPM, WorkerTerms, least
from muster.protocol.intervals import at_least


@dataclass(frozen=True, slots=True)
class Bench:
    """What a run and its deployment fix about judges."""

    quorum: int
    """Validators that must sign an outcome."""
    validator_stake: int
    """Active stake of each."""
    wrong_verdict_ppm: int
    """Millionths of a signer's stake that an overturned verdict costs."""
    bond: int
    """Bond that is lost with a rejected claim."""
    reporter_ppm: int
    """Millionths of a slash that go to the fraud's reporter."""
    reporter_cap: int
    """The most a reporter gets for one fraud."""
    jury_size: int
    """Jurors of a case."""
    juror_stake: int = 0
    """Active stake of a juror of the network."""
    juror_fee: int = 0
    """What a juror of the prevailing ruling earns at most."""
    absence_ppm: int = 0
    """Millionths of a juror's stake that a missing vote costs."""
    colluding: float = 0.2
    """Share of the network's bench in the adversary's hands."""
    trap_rate: float = 0.0
    """Share of a validator's work whose right verdict is known to a potential challenger: traps,
    and outcomes that others check again."""
    recheck_rate: float = 0.05
    """Share of accepted submissions that an honest stranger checks again within the window."""
    check_cost: float = 0.125
    """Cost of checking a submission, as a share of its price."""

    @property
    def signer_loss(self) -> float:
        """What one overturned verdict costs one of its signers."""
        return self.validator_stake * self.wrong_verdict_ppm / PPM


def dishonest_majority(share: float, size: int) -> float:
    """Return the probability that most of `size` judges belong to the adversary.

    Each judge does, independently, with probability `share`.
    """
    return at_least(size, share, size // 2 + 1)


def lazy_profit(terms: WorkerTerms, bench: Bench) -> float:
    """Return the profit of accepting a submission unseen: k - t S_v, where k is the saved cost of
    the check."""
    return bench.check_cost * terms.units * terms.price_wei - bench.trap_rate * bench.signer_loss


def lazy_trap_rate(terms: WorkerTerms, bench: Bench) -> float:
    """Return the least trap rate at which checking is cheaper; above 1 when none is enough."""
    saved = bench.check_cost * terms.units * terms.price_wei
    return saved / bench.signer_loss if bench.signer_loss else float("inf")


def collusion_profit(terms: WorkerTerms, bench: Bench, stake: int) -> float:
    """Return the profit of a quorum that accepts its own worker's forged submission.

    It is paid unless somebody checks it again, challenges and wins; then every signer is slashed
    and the worker convicted of an exact fraud.
    """
    caught = bench.recheck_rate * (1 - dishonest_majority(bench.colluding, bench.jury_size))
    loss = bench.quorum * bench.signer_loss + stake * terms.exact_fraud_ppm / PPM
    return (1 - caught) * terms.units * terms.price_wei - caught * loss


def collusion_recheck_rate(terms: WorkerTerms, bench: Bench, stake: int) -> float:
    """Return the share of accepted work to check again so that collusion does not pay."""
    gain = terms.units * terms.price_wei
    loss = bench.quorum * bench.signer_loss + stake * terms.exact_fraud_ppm / PPM
    won = 1 - dishonest_majority(bench.colluding, bench.jury_size)
    return gain / ((gain + loss) * won) if (gain + loss) * won else float("inf")


def reporter_share(terms: WorkerTerms, bench: Bench, stake: int) -> float:
    """Return what a challenger is paid for a fraud that validators had not found."""
    return min(stake * terms.exact_fraud_ppm / PPM * bench.reporter_ppm / PPM, bench.reporter_cap)


def accuser_profit(terms: WorkerTerms, bench: Bench, stake: int) -> float:
    """Return the profit of claiming that an honest worker's accepted submission is fraud.

    A dishonest jury gives the accuser its share of the slash; an honest one takes the bond.
    """
    won = dishonest_majority(bench.colluding, bench.jury_size)
    return won * reporter_share(terms, bench, stake) - (1 - won) * bench.bond


def minimal_bond(terms: WorkerTerms, bench: Bench, stake: int) -> int | None:
    """Return the smallest bond at which a false accusation does not pay; None if there is none."""
    won = dishonest_majority(bench.colluding, bench.jury_size)
    share = reporter_share(terms, bench, stake)
    return least(lambda bond: won * share <= (1 - won) * bond, MAX_STAKE)


def extortion_profit(bench: Bench) -> float:
    """Return the profit of a quorum's false fraud verdict, which is never positive.

    Judges get no share of a slash, and lose theirs unless the jury is theirs too.
    """
    lost = 1 - dishonest_majority(bench.colluding, bench.jury_size)
    return -lost * bench.quorum * bench.signer_loss


def absent_juror_profit(terms: WorkerTerms, bench: Bench) -> float:
    """Return the profit of a juror that stays away: the saved check minus its fee and the fine."""
    saved = bench.check_cost * terms.units * terms.price_wei
    return saved - bench.juror_fee - bench.juror_stake * bench.absence_ppm / PPM


def guessing_juror_profit(terms: WorkerTerms, bench: Bench) -> float:
    """Return the profit of a juror that votes unseen and guesses one of two rulings.

    A juror in the minority loses only its fee. Votes are hidden until all are cast, so none can be
    copied.
    """
    return bench.check_cost * terms.units * terms.price_wei - bench.juror_fee / 2
