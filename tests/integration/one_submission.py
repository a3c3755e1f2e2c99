"""A submission of a tiny model, judged without a network."""

from collections.abc import Sequence

from muster.client.tickets import TicketTerms
from muster.client.validator.checks import ClaimedWork
from muster.client.validator.judging import Judgement, Rules, examine
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash, keccak
from muster.protocol.ids import PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import Submission, Ticket
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout, count_units, decode_rollouts, encode_rollouts
from muster.toploc import Calibration
from muster.toploc.calibration import CalibratedModel, ChunkLimits, SamplerLimits

CALIBRATION = Calibration(
    model=CalibratedModel(
        name="tiny", architecture="Qwen3ForCausalLM", hidden_size=64, vocab_size=20, engine="-"
    ),
    chunk=ChunkLimits(
        max_exponent_mismatches=4,
        max_mantissa_error_mean=2.0,
        max_mantissa_error_median=2.0,
        max_sign_mismatches=2,
    ),
    sampler=SamplerLimits(margin=0.01, max_outside_per_sample=0),
    fraud_strikes=2,
)
WORKER = to_address(keccak(b"worker")[:20])


def recipe(problems: int, samples: int, limit: int) -> Recipe:
    """Return a recipe for completions of at most `limit` tokens."""
    sampling = SamplingRecipe(
        problems_per_submission=problems,
        samples_per_problem=samples,
        temperature=1.0,
        max_new_tokens=limit,
    )
    return Recipe(name="tiny", sampling=sampling, training=TrainingRecipe(submissions_per_step=1))


def ticket(index: int) -> Ticket:
    """Return a ticket for the first policy."""
    root, beacon = keccak(b"root"), keccak(b"block")
    return Ticket(RunId(1), WORKER, Step(1), index, PolicyVersion(0), root, beacon, 1 << 40)


def judge(
    rows: Sequence[Rollout], issued: Ticket, rules: Rules, engine: TransformersEngine
) -> Judgement:
    """Return a validator's findings about the rows of a ticket."""
    data = encode_rollouts(rows)
    units = count_units(rows, rules.recipe.sampling.max_new_tokens)
    submission = Submission(
        issued.run_id, WORKER, issued.step, issued.index, issued.policy_version, file_hash(data),
        len(rows), units,
    )  # fmt: skip
    terms = TicketTerms(Domain(1, WORKER), WORKER, issued.run_id, WORKER, {})
    claim = ClaimedWork(submission, b"", issued, b"", 0, terms, 1, WORKER, False)
    return examine(claim, decode_rollouts(data), rules, engine)
