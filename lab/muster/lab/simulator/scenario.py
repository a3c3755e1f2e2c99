"""Scenarios: participants, their behaviour, failures, and the run's rules."""

from dataclasses import dataclass

from muster.lab.simulator.actors import Conduct, Judging
from muster.lab.simulator.machines import ALPHABET, EOS
from muster.lab.simulator.model.words import Fixed
from muster.protocol.ids import RunId
from muster.protocol.recipe import ProofRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, SamplerLimits

RUN = RunId(1)
TOKEN = 10**18
MAX_SEATS = 88
"""Most seats of a run: the ledger stores the signers of a batch's outcomes in 88 bits."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Parameters of a simulation. Times are virtual seconds, shares are of all, rates are per
    node."""

    seed: int = 0
    """Same seed, same history."""
    workers: int = 8
    """Honest workers and cheats together."""
    validators: int = 4
    """Number of validators. All stake; the first MAX_SEATS have seats, the others get none."""
    jurors: int = 4
    """On the network's bench."""
    purchased: int = 0
    """Jurors that always vote for fraud."""
    quorum: int = 2
    """Validators that must agree."""
    duration_s: float = 300.0
    """Seconds of work; pending work is then judged and paid."""
    conduct: tuple[tuple[Conduct, int], ...] = ()
    """Number of dishonest workers by kind."""
    judging: tuple[tuple[Judging, int], ...] = ()
    """Number of dishonest validators by kind."""
    endpoints: int = 2
    """RPC endpoints that nodes are spread over; the orchestrator has its own."""
    block_s: float = 2.0
    """Seconds between blocks."""
    poll_s: float = 2.0
    """Seconds between two polls of the chain."""
    generate_s: float = 20.0
    """Mean seconds of generating a submission."""
    slow_share: float = 0.0
    """Share of the workers that take `slow_factor` times as long, the last ones."""
    slow_factor: float = 10.0
    """How much longer they take."""
    loops: int = 1
    """Loops of a worker's node: with 2 one fetches while another generates, as in production."""
    check_s: float = 2.0
    """Mean seconds of checking one."""
    latency_s: float = 0.05
    """Mean one-way delay of a message."""
    loss: float = 0.0
    """Share of messages lost."""
    churn_s: float = 0.0
    """Mean life of a node's process before it is killed and started again; 0 for no end."""
    disk_full_s: float = 0.0
    """Mean time between two full disks, of a worker each; 0 for never."""
    outage_s: float = 0.0
    """Mean time between two outages of a link or an endpoint; 0 for never."""
    is_silenced: bool = False
    """Whether honest validators are cut off until a false accusation is recorded; otherwise it
    never would be."""
    has_disputes: bool = False
    """Whether each worker, honest or not, disputes its first outcome that is not Accepted."""
    reorganise_s: float = 0.0
    """Mean time between two reorganisations; 0 for never."""
    reorganise_depth: int = 3
    """Most blocks that one takes away."""
    skew_s: int = 0
    """Largest error of a node's idea of the chain's time, either way."""
    fetch_s: float = 1.0
    """Mean seconds of fetching a policy."""
    relay_failures: float = 0.0
    """Share of fetches that no relay serves."""
    submissions_per_step: int = 8
    """Accepted submissions that a policy version takes."""
    train_s: float = 0.0
    """Seconds of a training step, from its last submission to its version's publication."""
    max_async_level: int = 2
    """How many versions old a rollout's policy may be."""
    outcome_deadline_s: int = 600
    """Seconds from a commitment to when its outcomes are due."""
    lease_s: int = 120
    """Seconds from lease to deadline."""
    retry_after_s: float = 5.0
    """Seconds that a node is told to wait when there is no work."""
    heartbeat_s: float = 30.0
    """Seconds between heartbeats."""
    batch_limit: int = 64
    """Most submissions in a batch."""
    commit_interval_s: float = 2.0
    """Minimum seconds between two commitments."""
    checks_blocks: bool = True
    """Whether the contracts' books are audited after every block."""


def recipe_of(scenario: Scenario) -> Recipe:
    """Return the run's recipe: submissions of four tiny samples."""
    return Recipe(
        name="simulation",
        sampling=SamplingRecipe(
            problems_per_submission=2, samples_per_problem=2, temperature=1.0, max_new_tokens=6
        ),
        proof=ProofRecipe(chunk_tokens=4, topk=8),
        training=TrainingRecipe(
            steps=0,
            submissions_per_step=scenario.submissions_per_step,
            max_async_level=scenario.max_async_level,
        ),
    )


CALIBRATION = Calibration(
    model=CalibratedModel(
        name="hash", architecture="Hash", hidden_size=8, vocab_size=EOS + 1, engine="simulated"
    ),
    proof=ProofRecipe(chunk_tokens=4, topk=8),
    temperature=1.0,
    chunk=ChunkLimits(
        max_exponent_mismatches=1,
        max_mantissa_error_mean=4.0,
        max_mantissa_error_median=4.0,
        max_sign_mismatches=0,
    ),
    sampler=SamplerLimits(margin=0.01, max_outside_per_sample=0),
    fraud_strikes=2,
)
assert len(ALPHABET) == EOS


def fixed(scenario: Scenario) -> Fixed:
    """Return the constants of the simulated deployment."""
    return Fixed(
        required_stake=100 * TOKEN,
        required_validator_stake=500 * TOKEN,
        activation_delay=1,
        jail_time=3600,
        challenge_window=30,
        outcome_deadline=scenario.outcome_deadline_s,
        commit_time=80,
        reveal_time=40,
        draw_delay=1,
        jury_size=3,
        bond=10 * TOKEN,
        juror_fee=TOKEN,
        required_juror_stake=500 * TOKEN,
        stake_per_unit=TOKEN // 10,
        unbonding=3600,
        insurance_ppm=200_000,
        reporter_ppm=100_000,
        reporter_cap=50 * TOKEN,
    )


FUNDS = 10**9 * TOKEN
"""Tokens that the run can pay."""
FOUNDED = 6
"""Blocks of the founding, which are never reorganised away."""
