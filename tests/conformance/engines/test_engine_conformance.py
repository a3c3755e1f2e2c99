"""The tests that every inference engine must pass.

Each test runs once per entry of `conformance_subjects.SUBJECTS`; to put a further engine through
the suite, add one there. float32 engines must choose the very tokens of the reference; engines of
other formats are judged as a validator judges them.
"""

import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance_policy import CONTEXT, EOS, HIDDEN, VOCABULARY
from conformance_reference import Reference
from conformance_subjects import Subject
from conformance_validator import PROOF, least_limits, verdicts

from muster.inference.engine import (
    Completion,
    InferenceEngine,
    Redraw,
    Request,
    Sample,
    Share,
    Watch,
)
from muster.inference.sampling import gumbel_noise
from muster.protocol.errors import EngineError, SampleUnfit
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.prompts import Part
from muster.toploc import verify_proofs_many
from muster.toploc.chunks import to_patterns
from muster.toploc.projections import SAME, distance, fingerprint, project


def drawn(count: int, *, limit: int = 40, group: int = 1, seed: int = 0) -> list[Request]:
    """Return requests whose prompts have 1 to 20 tokens, `group` samples for each."""
    rng = random.Random(seed)
    prompts = [
        tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 20)))
        for _ in range(-(-count // group))
    ]
    return [Request(prompts[i // group], rng.getrandbits(64), 1.0, limit) for i in range(count)]


def assert_right(
    subject: Subject, reference: Reference, requests: Sequence[Request], made: Sequence[Completion]
) -> None:
    """The completions are those of the reference, or close enough for the number format."""
    assert len(made) == len(requests)
    if subject.dtype == "float32":
        assert [c.tokens for c in made] == [reference.complete(r).tokens for r in requests]
    for request, completion in zip(requests, made, strict=True):
        tokens = completion.tokens
        assert 1 <= len(tokens) <= request.max_new_tokens
        assert EOS not in tokens[:-1]
        assert tokens[-1] == EOS or len(tokens) == request.max_new_tokens
        assert len(completion.proofs) == -(-len(tokens) // PROOF.chunk_tokens)


def test_completions_are_those_of_whole_forward_passes(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = drawn(12)
    assert_right(subject, reference, requests, engine.generate(requests, proof=PROOF))


@pytest.mark.parametrize("temperature", [0.4, 2.5])
def test_temperature_divides_the_logits(
    subject: Subject, engine: InferenceEngine, reference: Reference, temperature: float
) -> None:
    requests = [replace(r, temperature=temperature) for r in drawn(4, limit=16)]
    made = engine.generate(requests, proof=PROOF)
    assert_right(subject, reference, requests, made)
    assert set(verdicts(subject.dtype, engine, requests, made)) == {"accepted"}


def test_the_engine_accepts_its_own_work(subject: Subject, engine: InferenceEngine) -> None:
    requests = drawn(16, group=4)
    made = engine.generate(requests, proof=PROOF)
    assert verdicts(subject.dtype, engine, requests, made) == ["accepted"] * 16


def test_another_engine_accepts_its_work(
    subject: Subject, engine: InferenceEngine, other: InferenceEngine
) -> None:
    requests = drawn(16, group=4)
    made = engine.generate(requests, proof=PROOF)
    assert verdicts(subject.dtype, other, requests, made) == ["accepted"] * 16


def test_it_accepts_the_work_of_another_engine(
    subject: Subject, engine: InferenceEngine, other: InferenceEngine
) -> None:
    requests = drawn(16, group=4)
    made = other.generate(requests, proof=PROOF)
    assert verdicts(subject.dtype, engine, requests, made) == ["accepted"] * 16


def test_it_rejects_tokens_of_another_seed(subject: Subject, engine: InferenceEngine) -> None:
    requests = drawn(8)
    made = engine.generate(requests, proof=PROOF)
    others = [replace(request, seed=request.seed ^ 1) for request in requests]
    assert verdicts(subject.dtype, engine, others, made) == ["sampling"] * 8


def test_it_rejects_proofs_of_another_policy(
    subject: Subject, engine: InferenceEngine, policies: tuple[Path, Path]
) -> None:
    requests = drawn(8)
    made = engine.generate(requests, proof=PROOF)
    engine.load_policy(policies[1], PolicyVersion(1))
    assert verdicts(subject.dtype, engine, requests, made) == ["proofs"] * 8


def test_findings_of_token_t_are_those_of_the_row_it_was_chosen_by(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    # Choices under another noise: margins of every size, at the rows of the sample's own tokens.
    requests, proof = drawn(6), PROOF
    expected = [reference.complete(request) for request in requests]
    proofs = engine.prove(
        [(r.prompt_tokens, e.tokens) for r, e in zip(requests, expected, strict=True)], proof=proof
    )
    limits = least_limits(subject.dtype)
    tolerance, exponent_limit = (2e-3, 8) if subject.dtype == "float32" else (0.5, 32)
    samples = [
        Sample(r.prompt_tokens, e.tokens, r.seed ^ 1, made, redraws=(Redraw(r.seed, e.tokens),))
        for r, e, made in zip(requests, expected, proofs, strict=True)
    ]
    for sample, found, truth in zip(
        samples, engine.examine(samples, proof=proof, temperature=0.7), expected, strict=True
    ):
        logits_TV = truth.logits_TV / np.float32(0.7)
        tokens, rows = list(truth.tokens), np.arange(len(truth.tokens))
        for seed, replayed in ((sample.seed, found.replayed), (sample.seed ^ 1, found.redrawn[0])):
            scores_TV = logits_TV + gumbel_noise([seed] * len(rows), rows, VOCABULARY)
            margins_T = scores_TV.max(axis=1) - scores_TV[rows, tokens]
            assert replayed.margins_T == pytest.approx(margins_T, abs=tolerance)
            kept = scores_TV[rows, replayed.expected_T]
            assert kept == pytest.approx(scores_TV.max(axis=1), abs=tolerance)
        gap_T = truth.logits_TV[rows, tokens] - truth.logits_TV[rows, found.replayed.expected_T]
        is_clear_T = np.abs(gap_T) > tolerance
        assert (found.replayed.is_likelier_T == (gap_T > 0))[is_clear_T].all()
        odds_T = torch.tensor(logits_TV).softmax(dim=1)[:, EOS].numpy()
        assert found.ends_T == pytest.approx(odds_T, abs=tolerance)
        (results,) = verify_proofs_many([truth.hidden_TH], [sample.proofs])
        assert all(r.exponent_mismatches <= exponent_limit for r in results)
        assert all(map(limits.chunk_passes, found.chunks))


def test_projections_are_of_the_rows_of_each_sample(
    engine: InferenceEngine, reference: Reference
) -> None:
    requests, seed = drawn(2, limit=8), Hash32(bytes(range(32)))
    made = engine.generate(requests, proof=PROOF)
    lengths = [len(completion.tokens) for completion in made]
    shares = [(Share(seed, 0, sum(lengths)),), (Share(seed, lengths[0], sum(lengths)),)]
    samples = [
        Sample(r.prompt_tokens, c.tokens, r.seed, c.proofs, shares=of_sample)
        for r, c, of_sample in zip(requests, made, shares, strict=True)
    ]
    found = engine.examine(samples, proof=PROOF, temperature=1.0)
    sums = np.sum([each.projections[0] for each in found], axis=0)
    rows = np.concatenate(
        [
            reference.predict((*r.prompt_tokens, *c.tokens))[0][len(r.prompt_tokens) - 1 : -1]
            for r, c in zip(requests, made, strict=True)
        ]
    )
    truth = project(to_patterns(rows), seed)
    assert distance(fingerprint(sums, sum(lengths), HIDDEN), truth) <= SAME
    # The samples in another order make another block.
    others = [replace(s, shares=o) for s, o in zip(samples, shares[::-1], strict=True)]
    moved = engine.examine(others, proof=PROOF, temperature=1.0)
    sums = np.sum([each.projections[0] for each in moved], axis=0)
    assert distance(fingerprint(sums, sum(lengths), HIDDEN), truth) > SAME


def test_proofs_are_of_the_rows_that_chose_the_tokens(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = [replace(r, max_new_tokens=40) for r in drawn(6)]
    made = engine.generate(requests, proof=PROOF)
    whole = [
        reference.predict((*r.prompt_tokens, *c.tokens))[0]
        for r, c in zip(requests, made, strict=True)
    ]
    exponent_limit = 8 if subject.dtype == "float32" else 32
    for shift, is_alike in ((0, True), (1, False), (-1, False)):
        for request, completion, hidden_LH in zip(requests, made, whole, strict=True):
            first = max(0, len(request.prompt_tokens) - 1 + shift)
            rows = hidden_LH[first : first + len(completion.tokens)]
            if len(rows) < len(completion.tokens) or (first == 0 and shift == -1):
                continue
            (results,) = verify_proofs_many([rows], [completion.proofs])
            assert is_alike == all(r.exponent_mismatches <= exponent_limit for r in results)


def test_eos_ends_a_completion_inside_the_limit_at_it_and_beyond_it(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = [r for r in drawn(30) if reference.complete(r).tokens[-1] == EOS]
    inside = [r for r in requests if len(reference.complete(r).tokens) > 2][:4]
    assert len(inside) == 4
    lengths = [len(reference.complete(r).tokens) for r in inside]
    cut = [
        replace(r, max_new_tokens=length + more)
        for r, length in zip(inside, lengths, strict=True)
        for more in (-1, 0, 1)
    ]
    made = engine.generate(cut, proof=PROOF)
    assert_right(subject, reference, cut, made)
    if subject.dtype == "float32":
        ends = [c.tokens[-1] == EOS for c in made]
        assert ends == [False, True, True] * 4


def test_eos_may_be_the_first_token(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    prompt = drawn(1)[0].prompt_tokens
    seeds = reference.seeds_of_first(prompt, EOS, 3)
    assert len(seeds) == 3
    requests = [Request(prompt, seed, 1.0, 9) for seed in seeds]
    made = engine.generate([*requests, *drawn(3)], proof=PROOF)[:3]
    assert_right(subject, reference, requests, made)
    assert verdicts(subject.dtype, engine, requests, made) == ["accepted"] * 3


def test_completions_of_one_token_have_a_proof(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = [*drawn(4, limit=1), *drawn(2, limit=20)]
    made = engine.generate(requests, proof=PROOF)
    assert_right(subject, reference, requests, made)
    assert [len(c.tokens) for c in made[:4]] == [1] * 4
    assert [len(c.proofs) for c in made[:4]] == [1] * 4
    assert verdicts(subject.dtype, engine, requests, made) == ["accepted"] * 6


@pytest.mark.parametrize("new_tokens", [1, 8])
def test_prompt_and_completion_may_fill_the_context(
    subject: Subject, engine: InferenceEngine, reference: Reference, new_tokens: int
) -> None:
    prompt = tuple(2 + i % (VOCABULARY - 2) for i in range(CONTEXT - new_tokens))
    requests = [Request(prompt, seed, 1.0, new_tokens) for seed in range(3)]
    made = engine.generate(requests, proof=PROOF)
    assert_right(subject, reference, requests, made)
    assert verdicts(subject.dtype, engine, requests, made) == ["accepted"] * 3


def test_nothing_may_exceed_the_context(engine: InferenceEngine) -> None:
    with pytest.raises(EngineError, match="context"):
        engine.generate([Request((2,) * (CONTEXT - 7), 1, 1.0, 8)], proof=PROOF)
    with pytest.raises(EngineError, match="context"):
        engine.prove([((2,) * (CONTEXT - 7), (3,) * 8)], proof=PROOF)


def test_samples_of_one_prompt_are_those_of_each_alone(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = drawn(24, limit=24, group=24)
    made = engine.generate(requests, proof=PROOF)
    assert_right(subject, reference, requests, made)
    assert len({c.tokens for c in made}) > 20


def test_a_batch_in_any_order_gives_the_same(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = [
        replace(request, max_new_tokens=limit)
        for request, limit in zip(drawn(12, group=3), (1, 9, 33, 5) * 3, strict=True)
    ]
    random.Random(7).shuffle(requests)
    assert_right(subject, reference, requests, engine.generate(requests, proof=PROOF))
    backwards = requests[::-1]
    assert_right(subject, reference, backwards, engine.generate(backwards, proof=PROOF))


def test_temperatures_may_differ_in_a_batch(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    (request,) = drawn(1, limit=12)
    requests = [replace(request, temperature=t) for t in (0.05, 1.0, 5.0)]
    assert_right(subject, reference, requests, engine.generate(requests, proof=PROOF))


def test_noise_may_begin_at_any_position(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    (whole,) = drawn(1, limit=24)
    tokens = reference.complete(whole).tokens
    requests = [
        replace(
            whole,
            prompt_tokens=(*whole.prompt_tokens, *tokens[:cut]),
            position=cut,
            max_new_tokens=whole.max_new_tokens - cut,
        )
        for cut in range(min(8, len(tokens)))
    ]
    made = engine.generate(requests, proof=PROOF)
    assert_right(subject, reference, requests, made)
    if subject.dtype == "float32":
        assert [c.tokens for c in made] == [tokens[r.position :] for r in requests]


def test_the_same_request_twice_gives_the_same_twice(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    requests = drawn(2, limit=10) * 2
    made = engine.generate(requests, proof=PROOF)
    assert_right(subject, reference, requests, made)
    assert [c.tokens for c in made[:2]] == [c.tokens for c in made[2:]]


def together(
    engine: InferenceEngine, calls: Sequence[Sequence[Request]], watches: Sequence[Watch | None]
) -> list[list[Completion] | BaseException]:
    """Return what calls at the same moment return, or raise."""
    with ThreadPoolExecutor(len(calls)) as pool:
        made = [
            pool.submit(engine.generate, asked, proof=PROOF, watch=watch, due=due)
            for due, (asked, watch) in enumerate(zip(calls, watches, strict=True))
        ]
        return [each.exception() or each.result() for each in made]


def test_calls_at_the_same_time_give_what_each_gives_alone(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    # Several lengths, so that one sample takes the rows that another leaves.
    calls = [drawn(9, group=3, seed=1), drawn(7, limit=9, seed=2), drawn(4, limit=24, seed=3)]
    for asked, made in zip(calls, together(engine, calls, [None] * 3), strict=True):
        assert not isinstance(made, BaseException)
        assert_right(subject, reference, asked, made)
        assert set(verdicts(subject.dtype, engine, asked, made)) == {"accepted"}


def test_a_call_that_cannot_be_served_is_refused_and_the_other_one_is_served(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    asked = drawn(6, seed=4)
    refused, made = together(engine, [[Request((VOCABULARY,), 1, 1.0, 5)], asked], [None] * 2)
    assert isinstance(refused, EngineError)
    assert not isinstance(made, BaseException)
    assert_right(subject, reference, asked, made)


def test_samples_are_examined_while_others_are_generated(
    subject: Subject, engine: InferenceEngine, reference: Reference
) -> None:
    done, asked = drawn(4, seed=5), drawn(9, seed=6)
    made = engine.generate(done, proof=PROOF)
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(engine.generate, asked, proof=PROOF)
        while not generating.done():
            assert verdicts(subject.dtype, engine, done, made) == ["accepted"] * 4
    assert_right(subject, reference, asked, generating.result())


def test_next_policy_generates_from_its_own_weights_only(
    subject: Subject,
    engine: InferenceEngine,
    references: tuple[Reference, Reference],
    policies: tuple[Path, Path],
) -> None:
    # Long equal prompts, which a prefix cache would keep.
    prompt = tuple(2 + i % (VOCABULARY - 2) for i in range(100))
    requests = [Request(prompt, seed, 1.0, 12) for seed in range(4)]
    for version in (0, 1, 0):
        engine.load_policy(policies[version], PolicyVersion(version))
        assert engine.policy_version == version
        made = engine.generate(requests, proof=PROOF)
        assert_right(subject, references[version], requests, made)
        assert verdicts(subject.dtype, engine, requests, made) == ["accepted"] * 4


def test_damaged_policy_leaves_none_and_the_next_one_loads(
    subject: Subject,
    engine: InferenceEngine,
    reference: Reference,
    policies: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    damaged = shutil.copytree(policies[1], tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(EngineError):
        engine.load_policy(damaged, PolicyVersion(1))
    assert engine.policy_version is None
    with pytest.raises(EngineError, match="no policy is loaded"):
        engine.generate(drawn(1), proof=PROOF)
    engine.load_policy(policies[0], PolicyVersion(0))
    requests = drawn(2, limit=8)
    assert_right(subject, reference, requests, engine.generate(requests, proof=PROOF))


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        (Request((), 1, 1.0, 5), "empty"),
        (Request((2,), 1, 1.0, 0), "empty"),
        (Request((VOCABULARY,), 1, 1.0, 5), "outside the vocabulary"),
        (Request((-1,), 1, 1.0, 5), "outside the vocabulary"),
        (Request((1 << 70,), 1, 1.0, 5), "outside the vocabulary"),
        (Request((2,), 1, 0.0, 5), "cannot sample"),
        (Request((2,), 1, -1.0, 5), "cannot sample"),
        (Request((2,), 1, float("nan"), 5), "cannot sample"),
        (Request((2,), -1, 1.0, 5), "cannot sample"),
        (Request((2,), 1 << 64, 1.0, 5), "cannot sample"),
        (Request((2,), 1, 1.0, 5, position=-1), "position"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    engine: InferenceEngine, refused: Request, match: str
) -> None:
    with pytest.raises(EngineError, match=match):
        engine.generate([*drawn(1, limit=2), refused], proof=PROOF)
    # The engine still works.
    assert len(engine.generate(drawn(1, limit=2), proof=PROOF)) == 1


@pytest.mark.parametrize(
    "refused", [((), (2,)), ((2,), ()), ((2,), (VOCABULARY,)), ((2,), (-1,)), ((1 << 70,), (2,))]
)
def test_samples_that_cannot_be_computed_are_refused(
    engine: InferenceEngine, refused: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    with pytest.raises(SampleUnfit):
        engine.prove([refused], proof=PROOF)
    with pytest.raises(SampleUnfit):
        engine.examine([Sample(*refused, 1, [])], proof=PROOF, temperature=1.0)


def test_nothing_asked_gives_nothing(engine: InferenceEngine) -> None:
    assert engine.generate([], proof=PROOF) == []
    assert engine.prove([], proof=PROOF) == []
    assert engine.examine([], proof=PROOF, temperature=1.0) == []


def test_the_engine_knows_its_policy(engine: InferenceEngine) -> None:
    assert (engine.hidden_size, engine.vocab_size) == (HIDDEN, VOCABULARY)
    assert engine.eos_token_ids == frozenset({EOS})
    assert engine.policy_version == 0


def test_text_round_trips_without_eos(engine: InferenceEngine) -> None:
    text = "sort 3172: "
    assert engine.decode((*engine.encode(text), EOS)) == text
    assert engine.encode(text, is_start=False) == engine.encode(text)


def test_a_text_in_a_chat_prompt_writes_no_control_token(engine: InferenceEngine) -> None:
    tokens = engine.encode((Part("<eos>", True), Part("sort<eos>3", False)), is_start=False)
    assert tokens[0] == EOS
    assert EOS not in tokens[1:]
    assert tokens[1:5] == engine.encode("sort", is_start=False)
    # A prompt that is no chat prompt is read as the tokenizer reads it.
    assert EOS in engine.encode("sort<eos>3")
