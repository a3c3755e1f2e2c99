"""Completions of several turns: played by workers, followed by validators, and cheating twins."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from worlds.client_world import RULES, VERSION, HashEngine, make_claim, make_submission, make_ticket

from muster.client.validator.judging import Judgement, Rules, examine
from muster.client.worker.generation import play_ticket
from muster.inference.dialogue import Claimed, Followed, follow, play
from muster.inference.engine import Request
from muster.lab.simulator.machines import EOS
from muster.protocol.errors import EncodingError, EngineError, TaskError, ValidatorDisturbed
from muster.protocol.messages import Reason, Verdict
from muster.protocol.recipe import ProofRecipe
from muster.protocol.rollouts import Rollout, count_units, decode_rollouts, encode_rollouts
from muster.tasks import (
    Done,
    Environment,
    Graded,
    Problem,
    Reply,
    Undecided,
    Verifier,
    exact_match,
    registry,
)
from muster.toploc import build_proofs

LIMIT = 28
TICKET = make_ticket()
RECIPE = RULES.recipe.model_copy(
    update={
        "sampling": RULES.recipe.sampling.model_copy(
            update={"max_new_tokens": LIMIT, "samples_per_problem": 8}
        )
    }
)
LONG_RULES = replace(RULES, recipe=RECIPE)
PROBLEM = RULES.task_set[0]


def count_words(_problem: Problem, said: tuple[str, ...]) -> Reply | Done:
    """Reply with the length of the turn; the third turn is the last."""
    return Reply(f"={len(said[-1])}=") if len(said) < 3 else Done(said[-1])


def unsure(problem: Problem, said: tuple[str, ...]) -> Reply | Done:
    """Reply the same, and say that other machines may differ."""
    turn = count_words(problem, said)
    return replace(turn, is_repeatable=False) if isinstance(turn, Reply) else turn


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that makes another one the environment of all problems."""

    def put(turn: Callable[..., object], **options: object) -> None:
        verifier = replace(
            exact_match.VERIFIER,
            grade=lambda _, text: Graded(float(len(text) % 2)),
            dialogue=Environment(turn, sources=(), **options),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": verifier})

    put(count_words)
    return put


def work() -> list[Rollout]:
    return play_ticket(TICKET, RECIPE, RULES.task_set, HashEngine(VERSION)).graded()


def judge(rows: list[Rollout], rules: Rules = LONG_RULES) -> Judgement:
    units = count_units(rows, LIMIT)
    claim = make_claim(make_submission(TICKET, rows, units=units), TICKET)
    return examine(claim, rows, rules, HashEngine(VERSION))


def found(judgement: Judgement) -> tuple[Verdict, Reason]:
    assert judgement.finding is not None
    return judgement.finding.verdict, judgement.finding.reason


def proven(row: Rollout, tokens: tuple[int, ...], **changes: object) -> Rollout:
    """Return the row with other completion tokens, honestly proven."""
    computed = HashEngine(VERSION).recompute([(row.prompt_tokens, tokens)])[0]
    proofs = build_proofs(computed.hidden_TH, chunk_tokens=4, topk=8)
    return replace(row, completion_tokens=tokens, proofs=b"".join(proofs), **changes)  # type: ignore[arg-type]


def with_row(rows: list[Rollout], number: int, row: Rollout) -> list[Rollout]:
    return [row if i == number else each for i, each in enumerate(rows)]


def replied(rows: list[Rollout], replies: int = 1) -> int:
    """Return the number of a row with at least `replies` replies."""
    return next(i for i, row in enumerate(rows) if len(row.replies) >= replies)


# Honest


@pytest.mark.usefixtures("install")
def test_an_honest_dialogue_is_accepted() -> None:
    rows = work()
    assert {len(row.replies) for row in rows} >= {0, 1, 2}
    assert judge(rows).finding is None
    assert decode_rollouts(encode_rollouts(rows)) == rows


@pytest.mark.usefixtures("install")
def test_replies_stand_after_each_turn_and_are_not_paid() -> None:
    rows = work()
    row = rows[replied(rows, 2)]
    (start, end), (second, _) = row.replies
    engine = HashEngine()
    first_turn = engine.decode(row.completion_tokens[:start])
    assert row.completion_tokens[start - 1] == EOS == row.completion_tokens[second - 1]
    assert engine.decode(row.completion_tokens[start:end]) == f"={len(first_turn)}="
    spans = sum(b - a for a, b in row.replies)
    assert row.sampled == len(row.completion_tokens) - spans
    assert count_units([row], LIMIT) == row.sampled


@pytest.mark.usefixtures("install")
def test_noise_goes_on_at_the_position_after_a_reply() -> None:
    rows = work()
    number = replied(rows)
    row = rows[number]
    assert max(judge(rows).replays[number].margins) == 0.0
    assert len(judge(rows).replays[number].margins) == row.sampled


def test_one_turn_is_the_same_with_and_without_an_environment(install: Install) -> None:
    install(lambda _, said: Done(said[-1]))
    with_environment = work()
    install(lambda *_: Done("?"), max_replies=0)
    assert work() == with_environment
    assert all(not row.replies for row in with_environment)
    assert judge(with_environment).finding is None


def test_the_turns_of_a_completion_are_bounded(install: Install) -> None:
    install(lambda *_: Reply("="), max_replies=1)
    rows = work()
    assert max(len(row.replies) for row in rows) == 1
    assert judge(rows).finding is None


def test_a_reply_without_room_is_not_made(install: Install) -> None:
    install(lambda *_: Reply("=" * LIMIT))
    rows = work()
    assert all(not row.replies for row in rows)
    assert judge(rows).finding is None


# Cheating


def test_an_altered_reply_is_fraud(install: Install) -> None:
    # The model goes on from the worker's made-up tokens, and is sampled honestly.
    install(lambda _, said: Reply(f"={len(said[-1]) + 1}=") if len(said) < 3 else Done(said[-1]))
    rows = work()
    install(count_words)
    assert found(judge(rows)) == (Verdict.FRAUD, Reason.WRONG_REPLY)


@pytest.mark.usefixtures("install")
def test_a_reply_that_is_left_out_is_fraud() -> None:
    rows = work()
    number = replied(rows)
    row = rows[number]
    short = proven(row, row.completion_tokens[: row.replies[0][0]], replies=())
    assert found(judge(with_row(rows, number, short))) == (Verdict.FRAUD, Reason.WRONG_REPLY)


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 1), (-1, 0)])
def test_replies_claimed_elsewhere_are_fraud(first: int, last: int) -> None:
    rows = work()
    number = replied(rows)
    (start, end), *rest = rows[number].replies
    claimed = replace(rows[number], replies=((start + first, end + last), *rest))
    assert found(judge(with_row(rows, number, claimed))) == (Verdict.FRAUD, Reason.WRONG_REPLY)


@pytest.mark.usefixtures("install")
def test_replies_where_nobody_replies_are_fraud() -> None:
    rows = work()
    number = next(i for i, row in enumerate(rows) if not row.replies)
    claimed = replace(rows[number], replies=((1, 2),))
    assert found(judge(with_row(rows, number, claimed))) == (Verdict.FRAUD, Reason.WRONG_REPLY)


def test_a_turn_too_many_is_fraud(install: Install) -> None:
    install(lambda _, said: Reply(f"={len(said[-1])}="), max_replies=3)
    rows = work()
    assert max(len(row.replies) for row in rows) == 3
    install(count_words)
    assert found(judge(rows)) == (Verdict.FRAUD, Reason.WRONG_REPLY)


def test_what_follows_the_end_is_fraud(install: Install) -> None:
    install(lambda _, said: Done(said[-1]))
    rows = work()
    number = next(i for i, row in enumerate(rows) if len(row.completion_tokens) < LIMIT - 3)
    row = rows[number]
    request = Request(
        (*row.prompt_tokens, *row.completion_tokens),
        row.sampling_seed,
        1.0,
        LIMIT - len(row.completion_tokens),
        len(row.completion_tokens),
    )
    (more,) = HashEngine(VERSION).generate([request], proof=ProofRecipe())
    longer = proven(row, (*row.completion_tokens, *more.tokens))
    assert found(judge(with_row(rows, number, longer))) == (Verdict.FRAUD, Reason.WRONG_TERMINATION)


def test_nothing_is_run_that_the_policy_did_not_say(install: Install) -> None:
    rows = work()
    number = replied(rows)
    row = rows[number]
    forged = proven(row, (*row.completion_tokens[:-1], (row.completion_tokens[-1] + 1) % EOS))
    said: list[tuple[str, ...]] = []
    install(lambda problem, turns: said.append(turns) or count_words(problem, turns))
    assert found(judge(with_row(rows, number, forged)))[1] == Reason.SAMPLER_MISMATCH
    hidden = replace(row, replies=((1, row.replies[0][1]), *row.replies[1:]))
    assert found(judge(with_row(rows, number, hidden))) == (Verdict.FRAUD, Reason.WRONG_REPLY)
    assert not said
    assert judge(rows).finding is None
    assert said


@pytest.mark.parametrize("runs", [True, False])
def test_no_program_is_graded_that_the_policy_did_not_say(
    monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    graded: list[str] = []
    verifier = replace(
        exact_match.VERIFIER,
        grade=lambda _, text: graded.append(text) or Graded(0.0),
        runs_programs=runs,
    )
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": verifier})
    rows = work()
    graded.clear()
    tokens = rows[0].completion_tokens
    forged = proven(rows[0], ((tokens[0] + 1) % EOS, *tokens[1:]))
    assert found(judge(with_row(rows, 0, forged)))[1] == Reason.SAMPLER_MISMATCH
    assert bool(graded) is not runs
    assert judge(rows).finding is None
    assert graded


@pytest.mark.usefixtures("install")
def test_a_completion_that_ends_with_a_reply_is_fraud() -> None:
    rows = work()
    number = replied(rows)
    row = rows[number]
    tokens = row.completion_tokens[: row.replies[0][1]]
    bare = proven(row, tokens, replies=row.replies[:1], task_reward=0.0)
    assert found(judge(with_row(rows, number, bare))) == (Verdict.FRAUD, Reason.WRONG_TERMINATION)
    # The file format refuses it already.
    with pytest.raises(EncodingError, match="not within its completion"):
        decode_rollouts(encode_rollouts([bare]))


@pytest.mark.usefixtures("install")
def test_text_of_one_s_own_after_a_reply_fails_the_replay() -> None:
    rows = work()
    number = replied(rows)
    row = rows[number]
    tokens = list(row.completion_tokens)
    place = row.replies[0][1]
    tokens[place] = (tokens[place] + 1) % EOS
    chosen = proven(row, tuple(tokens))
    assert found(judge(with_row(rows, number, chosen)))[1] == Reason.SAMPLER_MISMATCH


@pytest.mark.usefixtures("install")
def test_pay_for_replies_is_fraud() -> None:
    rows = work()
    tokens = sum(len(row.completion_tokens) for row in rows)
    claim = make_claim(make_submission(TICKET, rows, units=tokens), TICKET)
    judgement = examine(claim, rows, LONG_RULES, HashEngine(VERSION))
    assert found(judgement) == (Verdict.FRAUD, Reason.WRONG_UNITS)


# Honest machines that differ


def cut_short(turn: Reply | Done, length: int) -> Reply | Done:
    return replace(turn, text=turn.text[:length]) if isinstance(turn, Reply) else turn


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda *_: Reply("===", is_repeatable=False),
        lambda *_: Reply("=" * LIMIT, is_repeatable=False),
        # Its tokens are the first ones of the reply that the worker got.
        lambda problem, said: cut_short(unsure(problem, said), 1),
        lambda problem, said: cut_short(unsure(problem, said), 2),
    ],
    ids=["another", "longer", "one token of it", "two tokens of it"],
)
def test_another_reply_is_no_fraud_where_machines_may_differ(
    install: Install, elsewhere: Callable[..., object]
) -> None:
    install(unsure)
    rows = work()
    assert judge(rows).finding is None
    install(elsewhere)
    assert found(judge(rows)) == (Verdict.REJECTED, Reason.WRONG_REPLY)


def test_a_reply_that_is_not_made_twice_is_no_fraud(install: Install) -> None:
    rows = work()
    calls = iter(range(10_000))
    install(lambda *_: Reply("=" + "9" * (next(calls) % 3)))
    assert found(judge(rows)) == (Verdict.REJECTED, Reason.WRONG_REPLY)


@pytest.mark.parametrize("turn", [lambda *_: Undecided("no sandbox"), lambda *_: 1 / 0])
def test_an_environment_that_cannot_reply_gives_no_submission(
    install: Install, turn: Callable[..., object]
) -> None:
    rows = work()
    install(turn)
    assert found(judge(rows)) == (Verdict.REJECTED, Reason.WRONG_REPLY)
    with pytest.raises(TaskError, match="cannot be replied to"):
        work()


def test_a_machine_that_cannot_reply_judges_nobody_and_signs_nothing(install: Install) -> None:
    rows = work()
    install(lambda *_: Undecided("no processes", is_disturbance=True))
    with pytest.raises(ValidatorDisturbed, match="no processes"):
        judge(rows)
    with pytest.raises(EngineError, match="cannot be replied to"):
        work()


def test_an_environment_that_is_undecided_at_first_is_asked_again(install: Install) -> None:
    calls = iter(range(10_000))

    def late(problem: Problem, said: tuple[str, ...]) -> object:
        return Undecided("busy") if next(calls) % 3 else count_words(problem, said)

    rows = work()
    install(late)
    assert work() == rows


# Any tokens


@pytest.mark.usefixtures("install")
@settings(max_examples=200)
@given(st.lists(st.integers(0, EOS), min_size=1, max_size=LIMIT + 3).map(tuple))
def test_only_what_is_played_is_followed_without_fault(tokens: tuple[int, ...]) -> None:
    cuts = [place for place, token in enumerate(tokens[:-1], 1) if token == EOS]
    replies = tuple((cut, min(cut + 3, len(tokens) - 1)) for cut in cuts)
    for claimed in (replies, ()):
        (walked,) = follow(HashEngine(), [Claimed(PROBLEM, tokens, claimed)], RECIPE)
        assert isinstance(walked, Followed)
        if walked.fault is None:
            assert len(claimed) == len(cuts)
            assert len(tokens) <= LIMIT


def test_proofs_of_a_dialogue_are_those_of_one_prefill(install: Install) -> None:
    install(count_words)
    engine = HashEngine(VERSION)
    request = Request(engine.encode("31="), 5, 1.0, LIMIT)
    played = next(
        one
        for one in (
            play(engine, [(PROBLEM, replace(request, seed=seed))], RECIPE)[0] for seed in range(50)
        )
        if one.replies
    )
    computed = engine.recompute([(request.prompt_tokens, played.tokens)])[0]
    assert played.proofs == build_proofs(computed.hidden_TH, chunk_tokens=4, topk=8)


def test_an_environment_is_part_of_who_grades() -> None:
    plain = Verifier("v", "1", lambda *_: Graded(0.0), sources=("muster.tasks.exact_match",))
    ours = Environment(count_words, sources=("muster.tasks.completions",))
    hashes = {
        plain.code_hash,
        replace(plain, dialogue=ours).code_hash,
        replace(plain, dialogue=replace(ours, max_replies=2)).code_hash,
        replace(plain, dialogue=replace(ours, machine=lambda: "python 3")).code_hash,
        replace(plain, dialogue=replace(ours, sources=("muster.tasks.code",))).code_hash,
    }
    assert len(hashes) == 5
