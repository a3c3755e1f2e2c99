"""Completions of several turns: a worker plays them, a validator follows them again.

A completion is one sequence: the model's turn up to its EOS, the environment's reply, the next
turn, and so on (docs/protocol.md section 5). The places of replies are found by running the
environment over the turns, never by marks in the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from muster.inference.engine import InferenceEngine, Progress, Request, Watch
from muster.inference.prompts import after_last
from muster.protocol.prompts import Part, render_reply
from muster.protocol.recipe import PromptRecipe, ProofRecipe, Recipe
from muster.protocol.rollouts import Spans
from muster.tasks import Environment, Problem, Reply, Undecided, dialogue_of
from muster.tasks.verifier import Question, Turn, ask_all


class Reader:
    """Reads a model's turns, and writes replies to them, by a recipe's `[prompt]`."""

    def __init__(self, engine: InferenceEngine, prompt: PromptRecipe) -> None:
        self.engine = engine
        self._prompt = prompt
        mark = prompt.answer_after
        self._mark = engine.encode((Part(mark, True),), is_start=False) if mark else ()

    def said(self, turn: Sequence[int]) -> str:
        """Return a turn's text after its thought; empty if the thought does not end."""
        return self.engine.decode(after_last(turn, self._mark))

    def reply(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a reply, with the frame around it."""
        return self.engine.encode(render_reply(text, self._prompt), is_start=False)


@dataclass(frozen=True, slots=True)
class Following:
    """What follows a turn of the model that ended in EOS."""

    reply: tuple[int, ...]
    """The reply's tokens; none when the completion ends here."""
    answer: str
    """What is graded when it ends here."""
    is_repeatable: bool
    """Whether every honest machine gets the same result."""


def what_follows(
    reader: Reader, question: Question, turn: Turn, room: int
) -> Following | Undecided:
    """Return what follows a turn when `room` tokens of the completion are left.

    A reply that would leave the model no room for another token is not added.
    """
    if isinstance(turn, Undecided):
        return turn
    if not isinstance(turn, Reply):
        return Following((), turn.answer, is_repeatable=True)
    tokens = reader.reply(turn.text)
    if not tokens:
        return Undecided("the environment's reply has no tokens")
    if len(tokens) >= room:
        return Following((), question.said[-1], turn.is_repeatable)
    return Following(tokens, "", turn.is_repeatable)


# Playing


@dataclass(frozen=True, slots=True)
class Played:
    """A completion of any number of turns."""

    tokens: tuple[int, ...]
    """Turns and replies."""
    proofs: list[bytes]
    """TOPLOC proofs over all of them."""
    replies: Spans
    """Where the replies are."""
    answer: str | Undecided
    """What is to be graded; undecided when the environment could not go on."""

    @property
    def sampled(self) -> int:
        """How many of the tokens the model sampled."""
        return len(self.tokens) - sum(end - start for start, end in self.replies)


@dataclass(slots=True)
class _Play:
    problem: Problem
    request: Request
    environment: Environment | None
    tokens: tuple[int, ...] = ()
    proofs: list[bytes] = field(default_factory=list)
    replies: Spans = ()
    said: tuple[str, ...] = ()
    answer: str | Undecided | None = None

    def next_request(self) -> Request:
        """Return the request for the next turn."""
        asked = self.request
        return replace(
            asked,
            prompt_tokens=(*asked.prompt_tokens, *self.tokens),
            max_new_tokens=asked.max_new_tokens - len(self.tokens),
            position=asked.position + len(self.tokens),
        )

    def take(self, reader: Reader, turn: tuple[int, ...]) -> Question | None:
        """Take the model's turn; return what to ask about it, None when it is the last."""
        self.tokens += turn
        self.said += (reader.said(turn),)
        if self.environment is None or turn[-1] not in reader.engine.eos_token_ids:
            self.answer = self.said[-1]
            return None
        return Question(self.environment, self.problem, self.said)

    def go_on(self, found: Following | Undecided) -> None:
        """Take what follows the turn."""
        if isinstance(found, Undecided):
            self.answer = found
        elif not found.reply:
            self.answer = found.answer
        else:
            end = len(self.tokens) + len(found.reply)
            self.replies += ((len(self.tokens), end),)
            self.tokens += found.reply


def play(
    engine: InferenceEngine,
    asked: Sequence[tuple[Problem, Request]],
    recipe: Recipe,
    *,
    watch: Watch | None = None,
    due: int = 0,
) -> list[Played]:
    """Return the completions in the order asked; raises EngineError, and what `watch` raises.

    Calls with a smaller `due` are generated first. A completion without replies has the engine's
    own proofs; the proofs of the others are built by one prefill.
    """
    plays = [_Play(problem, r, dialogue_of(problem.task_type)) for problem, r in asked]
    reader, live = Reader(engine, recipe.prompt), plays
    while live:
        over = None if watch is None else _in_all(plays, live, watch)
        live = _play_turn(reader, live, recipe.proof, over, due)
    if replied := [each for each in plays if each.replies]:
        _prove(engine, replied, recipe.proof)
    return [Played(p.tokens, p.proofs, p.replies, p.answer or "") for p in plays]


def _play_turn(
    reader: Reader, live: list[_Play], proof: ProofRecipe, watch: Watch | None, due: int
) -> list[_Play]:
    """Play one turn and what follows it; return the plays that go on."""
    asked = [each.next_request() for each in live]
    made = reader.engine.generate(asked, proof=proof, watch=watch, due=due)
    asking: list[tuple[_Play, Question]] = []
    for each, completion in zip(live, made, strict=True):
        each.proofs = completion.proofs
        if question := each.take(reader, completion.tokens):
            asking.append((each, question))
    turns = ask_all([question for _, question in asking])
    for (each, question), turn in zip(asking, turns, strict=True):
        room = each.request.max_new_tokens - len(each.tokens)
        each.go_on(what_follows(reader, question, turn, room))
    return [each for each, _ in asking if each.answer is None]


def _in_all(plays: list[_Play], live: list[_Play], watch: Watch) -> Watch:
    """Return a watch for one turn that reports the progress of all turns so far.

    A sample of several turns has ended when nothing follows its turn, which is known only then.
    """
    before = sum(len(each.tokens) for each in plays)
    is_one_turn = all(each.environment is None for each in live)
    ended = [each for each in plays if each.answer is not None]
    ended_tokens = sum(len(each.tokens) for each in ended)

    def over(made: Progress) -> None:
        more, more_tokens = (made.ended, made.ended_tokens) if is_one_turn else (0, 0)
        watch(Progress(before + made.tokens, len(ended) + more, ended_tokens + more_tokens))

    return over


def _prove(engine: InferenceEngine, plays: list[_Play], proof: ProofRecipe) -> None:
    samples = [(each.request.prompt_tokens, each.tokens) for each in plays]
    for each, proofs in zip(plays, engine.prove(samples, proof=proof), strict=True):
        each.proofs = proofs


# Following


@dataclass(frozen=True, slots=True)
class DialogueFault:
    """A difference between a completion and what its turns and the environment lead to."""

    kind: Literal["reply", "ending"]
    """A wrong or missing reply, or a completion that ends too early or too late."""
    detail: str
    """For people."""
    is_repeatable: bool
    """Whether every honest machine finds it."""
    expected: tuple[int, ...] = ()
    """The reply that should be there, if one should."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A completion as its worker claims it."""

    problem: Problem
    """What it answers."""
    tokens: tuple[int, ...]
    """The completion."""
    replies: Spans
    """Where its replies are."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The result of following a completion."""

    answer: str
    """What is to be graded."""
    fault: DialogueFault | None = None
    """What is wrong with it; None if its replies are the claimed ones."""


@dataclass(slots=True)
class _Walk:
    """The way through one completion, turn by turn."""

    claimed: Claimed
    environment: Environment
    limit: int
    said: tuple[str, ...] = ()
    start: int = 0
    """Where the turn at hand begins."""
    end: int = 0
    """Where it ends."""
    result: Followed | Undecided | None = None

    @property
    def _next_claim(self) -> tuple[int, int] | None:
        done = len(self.said) - 1
        return self.claimed.replies[done] if done < len(self.claimed.replies) else None

    def read_turn(self, reader: Reader) -> Question | None:
        """Read the next turn; return what to ask about it, None when it has no EOS."""
        tokens, eos = self.claimed.tokens, reader.engine.eos_token_ids
        last = next((i for i in range(self.start, len(tokens)) if tokens[i] in eos), None)
        self.end = len(tokens) if last is None else last + 1
        self.said += (reader.said(tokens[self.start : self.end]),)
        if last is not None:
            return Question(self.environment, self.claimed.problem, self.said)
        self._finish(self.said[-1], is_end=self.start < self.end == self.limit, is_repeatable=True)
        return None

    def go_on(self, found: Following | Undecided) -> None:
        """Compare what should follow the turn with the claimed tokens."""
        if isinstance(found, Undecided):
            self.result = found
            return
        tokens, after = self.claimed.tokens, self.end + len(found.reply)
        if not found.reply:
            is_end = self.end == len(tokens) <= self.limit
            self._finish(found.answer, is_end=is_end, is_repeatable=found.is_repeatable)
        elif self._next_claim == (self.end, after) and tokens[self.end : after] == found.reply:
            self.start = after
        else:
            detail = f"another reply at token {self.end}, or none"
            fault = DialogueFault("reply", detail, found.is_repeatable, found.reply)
            self.result = Followed(self.said[-1], fault)

    def _finish(self, answer: str, *, is_end: bool, is_repeatable: bool) -> None:
        fault = None
        if self._next_claim is not None:
            fault = DialogueFault("reply", f"nothing is replied at token {self.end}", is_repeatable)
        elif not is_end:
            length = len(self.claimed.tokens)
            fault = DialogueFault(
                "ending", f"a turn ends at {self.end} of {length} tokens", is_repeatable
            )
        self.result = Followed(answer, fault)


def follow(
    engine: InferenceEngine, completions: Sequence[Claimed], recipe: Recipe
) -> list[Followed | Undecided]:
    """Return the results of following completions, by running their environments again.

    Never raises for tokens of the vocabulary. The claimed replies are compared by place: if a reply
    had another length on another honest machine, everything after it would be displaced. A
    completion of a task without environment is one turn, whose ending the caller checks.
    """
    reader, limit = Reader(engine, recipe.prompt), recipe.sampling.max_new_tokens
    walks = {
        i: _Walk(claimed, environment, limit)
        for i, claimed in enumerate(completions)
        if (environment := dialogue_of(claimed.problem.task_type))
    }
    live = list(walks.values())
    while live:
        live = _follow_turn(reader, live)
    return [
        (walks[i].result or Undecided("never followed")) if i in walks else _one_turn(reader, each)
        for i, each in enumerate(completions)
    ]


def _one_turn(reader: Reader, claimed: Claimed) -> Followed:
    fault = DialogueFault("reply", "nobody replies to this task", True) if claimed.replies else None
    return Followed(reader.said(claimed.tokens), fault)


def _follow_turn(reader: Reader, live: list[_Walk]) -> list[_Walk]:
    """Follow one turn; return the walks that go on."""
    read = [(walk, walk.read_turn(reader)) for walk in live]
    asking = [(walk, question) for walk, question in read if question is not None]
    turns = ask_all([question for _, question in asking])
    for (walk, question), turn in zip(asking, turns, strict=True):
        walk.go_on(what_follows(reader, question, turn, walk.limit - walk.end))
    return [walk for walk, _ in asking if walk.result is None]
