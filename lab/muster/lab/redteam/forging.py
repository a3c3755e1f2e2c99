"""A3, A6, A7, A12, A16, A17, A21: files with false content.

Validators derive or recompute prompts, problems, proofs, rewards and groups; each hook falsifies
some of them. The honest rollouts underneath are real.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from muster.inference import forgers
from muster.inference.forgers import Forger, RecomputedChunks
from muster.lab.redteam.gain import Gain
from muster.lab.redteam.sampling import resampled
from muster.lab.redteam.stage import Stage, Worker, retold
from muster.lab.redteam.trials import Attack, Outcome, Play, Variant
from muster.protocol.messages import Reason
from muster.protocol.rollouts import Rollout
from muster.tasks import Graded, Problem, verify
from muster.tasks.hacks import all_hacks, hacks_for as known_hacks

Rows = list[Rollout]
Alter = Callable[[Stage, Rows, Random], Rows]


class Retoucher(Worker):
    """Delivers honest rollouts after changing something about them."""

    def __init__(self, stage: Stage, random: Random, change: Alter) -> None:
        super().__init__(stage, random)
        self._change = change

    def alter(self, rows: Rows) -> Rows:
        """Return the changed rows."""
        return self._change(self.stage, rows, self.random)


def _play(change: Alter, *expected: Reason) -> Play:
    def play(stage: Stage, random: Random) -> Outcome:
        delivery = Retoucher(stage, random, change).deliver(stage.ticket(random))
        return stage.outcome(delivery, *expected)

    return play


def _pick(rows: Rows, random: Random) -> int:
    return random.randrange(len(rows))


def _with(rows: Rows, place: int, **changes: object) -> Rows:
    return [*rows[:place], replace(rows[place], **changes), *rows[place + 1 :]]  # type: ignore[arg-type]


# A3: prompts


def _hinted(tokens: tuple[int, ...], stage: Stage, random: Random) -> tuple[int, ...]:
    digits = stage.engine.encode("0123456789")
    kind = random.randrange(4)
    place = random.randrange(len(tokens))
    if kind == 0:
        return (*tokens[:place], random.choice(digits), *tokens[place:])
    if kind == 1:
        return (*tokens[:place], *tokens[place + 1 :])
    if kind == 2:
        other = [t for t in digits if t != tokens[place]]
        return (*tokens[:place], random.choice(other), *tokens[place + 1 :])
    return (*tokens, *tokens)


def _under_other_prompts(stage: Stage, rows: Rows, random: Random) -> Rows:
    prompts = [_hinted(row.prompt_tokens, stage, random) for row in rows]
    return resampled(stage, rows, prompts=prompts)


def _hidden_prompts(stage: Stage, rows: Rows, random: Random) -> Rows:
    changed = _under_other_prompts(stage, rows, random)
    return [
        replace(there, prompt_tokens=row.prompt_tokens)
        for there, row in zip(changed, rows, strict=True)
    ]


# A6: proofs that took no computation


def _forged(forger: Forger) -> Alter:
    def alter(stage: Stage, rows: Rows, random: Random) -> Rows:
        computed = stage.engine.recompute([(r.prompt_tokens, r.completion_tokens) for r in rows])
        shapes: defaultdict[int, list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            shapes[len(row.completion_tokens)].append(place)
        changed = list(rows)
        for places in shapes.values():
            chunks = RecomputedChunks(
                np.stack([computed[i].hidden_TH for i in places]),
                np.array([rows[i].completion_tokens for i in places]),
                np.array([rows[i].group for i in places]),
                stage.recipe.proof,
            )
            if len(np.unique(chunks.prompts_B % 2)) < 2:
                continue  # too few of this length for a template: left honest
            attempts = forger(chunks, np.random.default_rng(random.getrandbits(32)))
            for i, proof in zip(places, random.choice(attempts), strict=True):
                changed[i] = replace(rows[i], proofs=proof)
        return changed

    return alter


def _transplanted(_stage: Stage, rows: Rows, random: Random) -> Rows:
    donors = list(rows)
    random.shuffle(donors)
    same = defaultdict(list)
    for row in donors:
        same[len(row.proofs)].append(row.proofs)
    return [replace(row, proofs=same[len(row.proofs)].pop()) for row in rows]


# A7: proofs missing, extra, out of order


def _miscounted(_stage: Stage, rows: Rows, random: Random) -> Rows:
    place = _pick(rows, random)
    proofs = rows[place].proofs
    forms = (b"", proofs[: len(proofs) // 2], proofs + proofs, proofs[:-1], proofs + b"\0",
             bytes(len(proofs)), proofs[:2])  # fmt: skip
    return _with(rows, place, proofs=random.choice(forms))


def _reordered(_stage: Stage, rows: Rows, random: Random) -> Rows:
    """Swaps the proofs of two samples of different prompts and equal length."""
    pairs = [
        (a, b)
        for a, row in enumerate(rows)
        for b, other in enumerate(rows[:a])
        if other.group != row.group and len(other.proofs) == len(row.proofs)
    ]
    a, b = random.choice(pairs)
    return _with(_with(rows, a, proofs=rows[b].proofs), b, proofs=rows[a].proofs)


# A12 and A21: problems and groups


def _own_problem(stage: Stage, rows: Rows, _random: Random) -> Rows:
    size = stage.recipe.sampling.samples_per_problem
    return [replace(rows[i % size], group=i // size) for i in range(len(rows))]


def _skipped(stage: Stage, rows: Rows, random: Random) -> Rows:
    """Leaves out the groups with the longest answers, or just the last."""
    size = stage.recipe.sampling.samples_per_problem
    groups = len(rows) // size
    return rows[: size * random.randrange(1, groups)]


def _skipped_in_the_middle(stage: Stage, rows: Rows, random: Random) -> Rows:
    size = stage.recipe.sampling.samples_per_problem
    left_out = random.randrange(len(rows) // size - 1)
    return [row for row in rows if row.group != left_out]


def _easier_problem(stage: Stage, rows: Rows, random: Random) -> Rows:
    """Answers another problem of the task set in place of the assigned one."""
    size = stage.recipe.sampling.samples_per_problem
    group = random.randrange(len(rows) // size)
    given = {row.problem_id for row in rows}
    other = random.choice([p for p in stage.task_set if p.problem_id not in given])
    prompt = stage.engine.encode(other.prompt)
    return [
        replace(row, problem_id=other.problem_id, prompt_tokens=prompt)
        if row.group == group
        else row
        for row in rows
    ]


def _group_copy(_stage: Stage, rows: Rows, random: Random) -> Rows:
    """Replaces a sample by another of its group: fifteen bad and one good, or the reverse."""
    place = _pick(rows, random)
    mates = [r for r in rows if r.group == rows[place].group and r.sample != rows[place].sample]
    different = [r for r in mates if r.completion_tokens != rows[place].completion_tokens]
    mate = random.choice(different or mates)
    return _with(
        rows, place, completion_tokens=mate.completion_tokens, proofs=mate.proofs,
        task_reward=mate.task_reward, sampling_seed=mate.sampling_seed,
    )  # fmt: skip


def _group_edit(stage: Stage, rows: Rows, random: Random) -> Rows:
    """Edits one sample of a group into a right answer."""
    wrong = [i for i, row in enumerate(rows) if row.task_reward < 1]
    place = random.choice(wrong or range(len(rows)))
    gold = stage.problem(rows[place].problem_id).gold_standard_solution or "0000"
    said = (*stage.engine.encode(gold, is_start=False), *stage.engine.eos_token_ids)
    told = retold(stage, [rows[place]], [said])
    return [*rows[:place], *told, *rows[place + 1 :]]


def _steps_mixed(stage: Stage, rows: Rows, random: Random) -> Rows:
    """Replaces a group by one from another step's submission."""
    other = stage.honest(stage.ticket(random))
    size = stage.recipe.sampling.samples_per_problem
    group = random.randrange(len(rows) // size)
    return [o if o.group == group else row for row, o in zip(rows, other, strict=True)]


# A16: rewards


def _reward_flipped(_stage: Stage, rows: Rows, random: Random) -> Rows:
    place = _pick(rows, random)
    return _with(rows, place, task_reward=1.0 - rows[place].task_reward)


def _reward_shaved(_stage: Stage, rows: Rows, random: Random) -> Rows:
    place = _pick(rows, random)
    reward = rows[place].task_reward
    return _with(rows, place, task_reward=abs(reward - random.uniform(1e-9, 0.5)))


def _reward_absurd(_stage: Stage, rows: Rows, random: Random) -> Rows:
    absurd = (float("nan"), float("inf"), -float("inf"), -1.0, 1e308, 2.0, -1e-300)
    return _with(rows, _pick(rows, random), task_reward=random.choice(absurd))


def _rewards_swapped(_stage: Stage, rows: Rows, random: Random) -> Rows:
    right = [i for i, row in enumerate(rows) if row.task_reward == 1]
    wrong = [i for i, row in enumerate(rows) if row.task_reward < 1]
    if not right or not wrong:
        return _reward_flipped(_stage, rows, random)
    a, b = random.choice(right), random.choice(wrong)
    return _with(_with(rows, a, task_reward=rows[b].task_reward), b, task_reward=1.0)


def _units_inflated(stage: Stage, random: Random) -> Outcome:
    worker = Worker(stage, random)
    delivery = worker.deliver(stage.ticket(random))
    more = replace(delivery.submission, units=delivery.submission.units + random.randint(1, 10**6))
    return stage.outcome(
        replace(delivery, submission=more, signature=stage.sign(more)), Reason.WRONG_UNITS
    )


# A17: text made to please a careless verifier


def _hacked(stage: Stage, random: Random) -> Outcome:
    """Gives a known hack instead of an answer; the verifier must not reward it."""
    problem = random.choice(stage.task_set.problems)
    hack = random.choice(known_hacks(problem.task_type))
    return _hack_outcome(problem, hack.against(problem), hack.name)


def _hacked_math(_stage: Stage, random: Random) -> Outcome:
    gold = str(random.randint(10_000, 99_999))
    problem = Problem(
        problem_id=f"red-{gold}",
        task_type="verifiable_math",
        prompt="What is the number?",
        verification_info={"ground_truth": gold},
        gold_standard_solution=gold,
    )
    hacks = [hack for hack in all_hacks() if "verifiable_math" in hack.task_types]
    hack = random.choice(hacks)
    return _hack_outcome(problem, hack.completion.replace("{gold}", "7"), hack.name)


def _hack_outcome(problem: Problem, text: str, name: str) -> Outcome:
    grade = verify(problem, text)
    earned = grade.score if isinstance(grade, Graded) else 0.0
    return Outcome(earned == 0.0, f"score {earned:g}", "NO_REWARD", knobs={"hack": name})


STATISTICS = (Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH)
PROOFS = "proofs over the policy's hidden states, inside limits that no forger passed (check 6)"
DERIVED = "problems, prompts and seeds follow from the ticket (check 3)"

ATTACKS = (
    Attack(
        "A3",
        "prompts altered: a hint, a token more, less or changed",
        "prompts are rebuilt from the ticket (check 3); proofs cover them (check 6)",
        "hard",
        (
            Variant("altered and stated", _play(_under_other_prompts, Reason.WRONG_PROBLEM)),
            Variant("altered and hidden", _play(_hidden_prompts, *STATISTICS, Reason.WRONG_REWARD)),
        ),
        Gain(saved=0.0, extra=0.5),
    ),
    Attack(
        "A6",
        "proofs that took no computation: constant, template, random, transplanted",
        PROOFS,
        "hard",
        (
            *(
                Variant(name, _play(_forged(forger), *STATISTICS, Reason.PROOF_ENCODING))
                for name, forger in forgers.NOTHING.items()
            ),
            Variant("signs turned", _play(_forged(forgers.negated), *STATISTICS)),
            Variant("proofs shuffled within the file", _play(_transplanted, *STATISTICS)),
        ),
        Gain(saved=0.9),
    ),
    Attack(
        "A7",
        "proofs left out, doubled, cut, emptied or exchanged",
        "exactly one canonical proof per chunk (check 2), each against its own chunk (check 6)",
        "hard",
        (
            Variant(
                "missing, extra, cut or null",
                _play(_miscounted, Reason.PROOF_COUNT, Reason.PROOF_ENCODING),
            ),
            Variant("exchanged between samples", _play(_reordered, *STATISTICS)),
        ),
        Gain(saved=0.1),
    ),
    Attack(
        "A12",
        "prompts chosen: hard problems skipped, one problem over and over, an easier one",
        DERIVED + "; a file without all groups is not paid (check 2)",
        "hard",
        (
            Variant("one problem over and over", _play(_own_problem, Reason.WRONG_PROBLEM)),
            Variant("an easier problem", _play(_easier_problem, Reason.WRONG_PROBLEM)),
            Variant("last groups left out", _play(_skipped, Reason.FILE_INCOMPLETE)),
            Variant("a group left out", _play(_skipped_in_the_middle, Reason.SCHEMA)),
        ),
        Gain(saved=0.5),
    ),
    Attack(
        "A16",
        "rewards and units made up",
        "rewards are graded again, units counted again (check 4); ranges (check 2)",
        "hard",
        (
            Variant("a reward turned", _play(_reward_flipped, Reason.WRONG_REWARD)),
            Variant("a reward a little off", _play(_reward_shaved, Reason.WRONG_REWARD)),
            Variant("NaN, infinite or out of range", _play(_reward_absurd, Reason.SCHEMA)),
            Variant("two rewards exchanged", _play(_rewards_swapped, Reason.WRONG_REWARD)),
            Variant("units inflated", _units_inflated),
        ),
        Gain(saved=0.0, extra=1.0),
    ),
    Attack(
        "A17",
        "text that earns a reward from a careless verifier",
        "the corpus of known hacks scores nothing (docs/tasks.md)",
        "hard",
        (Variant("on the run's problems", _hacked), Variant("on math problems", _hacked_math)),
        Gain(saved=0.0, extra=1.0),
    ),
    Attack(
        "A21",
        "groups composed for advantage: a sample edited, copied, or of another step",
        DERIVED + "; every sample is replayed (check 7); advantages are the trainer's own",
        "hard",
        (
            Variant("a sample copied with its seed", _play(_group_copy, Reason.WRONG_SEED)),
            Variant("a wrong answer edited right", _play(_group_edit, Reason.SAMPLER_MISMATCH)),
            Variant("a group of another step", _play(_steps_mixed, Reason.WRONG_PROBLEM,
                                                      Reason.WRONG_SEED)),
        ),
        Gain(saved=0.0, extra=0.5),
    ),
)  # fmt: skip
