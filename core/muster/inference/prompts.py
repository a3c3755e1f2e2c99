"""Token ids of prompts, and where an answer begins among a turn's tokens.

Both engines encode with this, so that they agree. A chat prompt is encoded as the tokenizer would
encode the whole text, with one difference: control tokens are recognised in the frame only. A
problem's text that spells the token which ends a turn is encoded as its letters.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from muster.protocol.prompts import Part, Prompt


def encode_prompt(tokenizer: Any, prompt: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
    """Return the token ids of a prompt.

    At the start of a sequence a text gets the tokens that the tokenizer puts around one (a BOS,
    say). A chat prompt never does, because its frame has them.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt, add_special_tokens=is_start))
    control = _control_tokens(tokenizer, "".join(p.text for p in prompt if p.is_markup))
    pattern = re.compile(
        "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)"
    )
    found: list[int] = []
    for mark, text in _runs(prompt, pattern):
        if mark:
            found.append(control[mark])
        found += _encoded(tokenizer, mark, list(_broken(text, pattern)), control)
    return tuple(found)


def decode_completion(tokenizer: Any, tokens: Sequence[int], eos: frozenset[int]) -> str:
    """Return the text of a completion without EOS and special tokens."""
    kept = [token for token in tokens if token not in eos]
    text: str = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def after_last(tokens: Sequence[int], mark: Sequence[int]) -> Sequence[int]:
    """Return the tokens after the last occurrence of a mark: none if it does not occur, all if the
    mark is empty.
    """
    if not mark:
        return tokens
    for start in range(len(tokens) - len(mark), -1, -1):
        if tuple(tokens[start : start + len(mark)]) == tuple(mark):
            return tokens[start + len(mark) :]
    return ()


def _control_tokens(tokenizer: Any, markup: str) -> dict[str, int]:
    """Return the tokens that only a frame may have, by their texts: the special ones, and any other
    added token that this frame uses. The token for unknown text is not among them.
    """
    special, unknown = set(tokenizer.all_special_ids), tokenizer.unk_token_id
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.content
        and number != unknown
        and (token.special or number in special or token.content in markup)
    }


def _runs(parts: Sequence[Part], pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield each control token of the frame with the text up to the next one; the text before the
    first comes with an empty one.
    """
    mark, text = "", ""
    for part in parts:
        end = 0
        for found in pattern.finditer(part.text) if part.is_markup else ():
            yield mark, text + part.text[end : found.start()]
            mark, text, end = found[0], "", found.end()
        text += part.text[end:]
    yield mark, text


def _broken(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield a text in pieces that hold no control token: each is cut after its first character."""
    start = 0
    while found := pattern.search(text, start):
        cut = found.start() + 1
        yield text[start:cut]
        start = cut
    if text[start:]:
        yield text[start:]


def _encoded(
    tokenizer: Any, mark: str, pieces: list[str], control: dict[str, int]
) -> Iterator[int]:
    """Yield the ids of pieces that follow a control token, without any control token.

    Each is encoded behind the token, because some tokenizers treat the start of a text differently.
    """
    if not pieces:
        return
    forbidden = set(control.values())
    whole = tokenizer([mark + piece for piece in pieces], add_special_tokens=False)["input_ids"]
    for piece, ids in zip(pieces, whole, strict=True):
        if mark and ids[:1] == [control[mark]]:
            ids = ids[1:]
        elif mark:
            ids = tokenizer.encode(piece, add_special_tokens=False)
        # Encoding may still yield a control token, from another spelling of it.
        yield from (number for number in ids if number not in forbidden)
