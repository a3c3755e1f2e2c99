"""A row of a data set as the tokens that a model is fine-tuned on.

Texts are rendered by the recipe's `[prompt]`, as workers and validators render them. A reply of the
model is encoded so that no text from the data set becomes a control token. Tokens are int32; a
token that is not trained on is written as its bitwise complement, so that a row is one list.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from muster.inference.framing import read_tokenizer
from muster.inference.prompts import encode_prompt
from muster.protocol.prompts import Part, render_prompt, render_reply
from muster.protocol.sft import SftRecipe
from muster.tasks.row_files import Unreadable
from muster.trainer.publish.policies import eos_token_ids, vocab_size


class LeftOut(StrEnum):
    """Why a row is not trained on."""

    UNREADABLE = "unreadable"
    """It is not an object, too large, not UTF-8, or a required column is missing or not a text."""
    EMPTY = "empty"
    """Its prompt or its completion is empty, or all of its completion is replies."""
    LONG = "long"
    """It has more tokens than the recipe allows."""
    ROLES = "roles"
    """Its messages do not alternate, or the recipe's frame has no place for one of them."""
    REPLIES = "replies"
    """It contains replies of an environment, and its text does not mark them."""
    TOKENIZER = "tokenizer"
    """The base model's tokenizer decodes its tokens to other texts."""


class RowEncoder:
    """Encodes rows for one base model."""

    def __init__(self, recipe: SftRecipe, model: Path) -> None:
        """`recipe` includes its prompt's frame; the weights of `model` are not read."""
        self._recipe = recipe
        self._tokenizer = read_tokenizer(model)
        self._eos = eos_token_ids(model)
        own = self._tokenizer.eos_token_id
        self._end = min(self._eos) if own is None else own
        self._vocabulary = vocab_size(model)
        # This class checks the length of rows, so the library's warning is not needed.
        self._tokenizer.model_max_length = 1 << 30
        longest = max(map(len, self._tokenizer.get_vocab()))
        self._most_characters = recipe.rows.max_tokens * longest

    def encode(self, row: Any) -> list[int] | LeftOut:
        """Return a row's tokens, or why it is left out; never raises, whatever the row holds."""
        if isinstance(row, Unreadable) or not isinstance(row, Mapping):
            return LeftOut.UNREADABLE
        found = self._sampled(row) if self._recipe.rows.form == "tokens" else self._written(row)
        if isinstance(found, LeftOut):
            return found
        if len(found) > self._recipe.rows.max_tokens:
            return LeftOut.LONG
        if self._recipe.rows.trained == "all":
            found = [t if t >= 0 else ~t for t in found]
        if all(token < 0 for token in found[1:]):
            return LeftOut.EMPTY
        # Nothing predicts the first token.
        return [~found[0] if found[0] >= 0 else found[0], *found[1:]]

    # Rows of texts

    def _written(self, row: Mapping[str, Any]) -> list[int] | LeftOut:
        if row.get("replies"):
            return LeftOut.REPLIES
        # Checked first: a tokenizer may take minutes for a text that is too long anyway.
        if _characters(row) > self._most_characters:
            return LeftOut.LONG
        messages = _messages(row)
        if messages is not None:
            return self._conversation(messages)
        asked, answer, length = _asked(row), row.get("completion"), row.get("target_length", -1)
        if not (_is_text(asked) and _is_text(answer) and _is_number(length)):
            return LeftOut.UNREADABLE
        assert isinstance(asked, str)
        assert isinstance(answer, str)
        prompt = self._encoded(render_prompt(asked, length, self._recipe.prompt), is_start=True)
        turn = self._turn(answer, is_finished=row.get("is_finished") is not False)
        return [*_not_trained(prompt), *turn] if prompt and turn else LeftOut.EMPTY

    def _conversation(self, messages: Any) -> list[int] | LeftOut:
        """Return the tokens of messages; those of the model are trained on."""
        said = _said(messages)
        if said is None:
            return LeftOut.UNREADABLE
        prompt = self._recipe.prompt
        if said and said[0][0] == "system":
            if not prompt.has_system:
                return LeftOut.ROLES
            prompt = prompt.model_copy(update={"system": said[0][1]})
            said = said[1:]
        roles = [role for role, _ in said]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            return LeftOut.ROLES
        if len(roles) > 2 and prompt.reply_role != "user":
            return LeftOut.ROLES
        found: list[int] = []
        for number, ((_, asked), (_, answer)) in enumerate(zip(said[::2], said[1::2], strict=True)):
            rendered = render_reply(asked, prompt) if number else render_prompt(asked, -1, prompt)
            given, turn = self._encoded(rendered, is_start=not number), self._turn(answer)
            if not (given and turn):
                return LeftOut.EMPTY
            found += [*_not_trained(given), *turn]
        return found

    def _turn(self, text: str, *, is_finished: bool = True) -> list[int]:
        """Return the tokens of a message of the model; an empty list for an empty message."""
        found = self._encoded((Part(text, False),), is_start=False)
        return [*found, *[self._end] * is_finished] if found else []

    def _encoded(self, prompt: Any, *, is_start: bool) -> Sequence[int]:
        return encode_prompt(self._tokenizer, prompt, is_start=is_start)

    # Rows of sampled tokens

    def _sampled(self, row: Mapping[str, Any]) -> list[int] | LeftOut:
        prompt, completion = row.get("prompt_tokens"), row.get("completion_tokens")
        if not (self._is_tokens(prompt) and self._is_tokens(completion)):
            return LeftOut.UNREADABLE
        assert isinstance(prompt, list)
        assert isinstance(completion, list)
        if not prompt or not set(completion) - self._eos:
            return LeftOut.EMPTY
        ends = row.get("replies") or []
        if not _are_spans(ends, len(completion)):
            return LeftOut.UNREADABLE
        if len(prompt) + len(completion) > self._recipe.rows.max_tokens:
            return LeftOut.LONG
        if not self._reads(row, prompt, completion):
            return LeftOut.TOKENIZER
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            completion = [
                *completion[:start],
                *_not_trained(completion[start:end]),
                *completion[end:],
            ]
        return [*_not_trained(prompt), *completion]

    def _is_tokens(self, value: Any) -> bool:
        return isinstance(value, list) and all(
            _is_number(token) and 0 <= token < self._vocabulary for token in value
        )

    def _reads(self, row: Mapping[str, Any], prompt: list[int], completion: list[int]) -> bool:
        """Tell whether this model's tokenizer decodes the tokens to the row's texts."""
        said = [token for token in completion if token not in self._eos]
        options = {"clean_up_tokenization_spaces": False}
        decode = self._tokenizer.decode
        texts = (
            decode(prompt, skip_special_tokens=False, **options),
            decode(said, skip_special_tokens=True, **options),
        )
        return texts == (row.get("prompt"), row.get("completion"))


def first_question(row: Mapping[str, Any]) -> str:
    """Return the first text that a user says in a row's messages; empty when there is none."""
    said = _said(_messages(row)) or []
    return next((text for role, text in said if role == "user"), "")


def _messages(row: Mapping[str, Any]) -> Any:
    """Return a row's messages; None when it has texts instead."""
    asked, completion = _asked(row), row.get("completion")
    if row.get("messages") is None and isinstance(asked, list) and isinstance(completion, list):
        return asked + completion
    return row.get("messages")


def _asked(row: Mapping[str, Any]) -> Any:
    """Return a row's problem, or else its prompt: beside a problem, the prompt is its rendering for
    another model."""
    return row.get("problem") or row.get("prompt")


def _not_trained(tokens: Sequence[int]) -> list[int]:
    return [~token for token in tokens]


def _said(messages: Any) -> list[tuple[str, str]] | None:
    """Return roles and texts of messages; None when `messages` is malformed."""
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        return None
    said = [(each.get("role"), each.get("content")) for each in messages]
    if not all(isinstance(role, str) and _is_text(text) for role, text in said):
        return None
    return [(str(role), str(text)) for role, text in said]


def _characters(row: Mapping[str, Any]) -> int:
    """Return the number of characters in a row's texts."""
    values = [row.get(name) for name in ("problem", "prompt", "completion", "messages")]
    said = [each for value in values for each in (value if isinstance(value, list) else [value])]
    texts = [each.get("content") if isinstance(each, Mapping) else each for each in said]
    return sum(len(text) for text in texts if isinstance(text, str))


def _is_text(value: Any) -> bool:
    """Tell whether a value is a text that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_spans(ends: Any, length: int) -> bool:
    """Tell whether numbers are starts and ends of ranges, in order, within a list of this
    length."""
    if not isinstance(ends, list) or len(ends) % 2 or not all(map(_is_number, ends)):
        return False
    return ends == sorted(set(ends)) and (not ends or (ends[0] >= 0 and ends[-1] <= length))
