"""Prompts: the texts that a model reads for a problem and for a reply.

Workers, validators, calibration and evaluation call these functions with the pinned recipe, so that
they get the same text. A chat prompt is a frame around texts, and the frame is pinned in the
recipe: nobody runs a stranger's template, and no text changes the frame. `muster.inference.framing`
finds the frame, `muster.inference.prompts` makes token ids of a prompt.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from muster.protocol.recipe import PromptRecipe

_TOKENS_PER_CHARACTER = 8
_SPECIAL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a chat prompt; pieces follow each other directly."""

    text: str
    """The piece."""
    is_markup: bool
    """Whether it belongs to the frame. Control tokens are recognised only there."""


Prompt = str | tuple[Part, ...]
"""A model's prompt: a text as the tokenizer reads it, or the pieces of a chat prompt."""


def render_prompt(text: str, target_length: int, prompt: PromptRecipe) -> Prompt:
    """Return the model's prompt for a problem's text, by a recipe's `[prompt]`.

    A target length is in tokens, -1 for none.
    """
    if prompt.form == "plain":
        return request_length(text, target_length)
    frame, system = prompt.frame, prompt.system
    if prompt.length_request == "system":
        system = request_length(system, target_length)
    else:
        text = request_length(text, target_length)
    asked = (Part(text, False), Part(frame.end, True))
    if not prompt.has_system:
        return (Part(frame.begin, True), *asked)
    return (Part(frame.begin, True), Part(system, False), Part(frame.middle, True), *asked)


def render_reply(text: str, prompt: PromptRecipe) -> Prompt:
    """Return what follows the end of a model's turn when the reply is `text`."""
    if prompt.form == "plain":
        return text
    frame = prompt.frame
    return (Part(frame.reply_begin, True), Part(text, False), Part(frame.reply_end, True))


def request_length(text: str, target_length: int) -> str:
    """Return a text with a length request at its end, in INTELLECT-2's words; -1 for none."""
    if target_length < 0:
        return text
    request = f"Think for {target_length} tokens before giving a response."
    return f"{text}\n\n{request}" if text else request


def text_of(prompt: Prompt) -> str:
    """Return a prompt as one text."""
    return prompt if isinstance(prompt, str) else "".join(part.text for part in prompt)


def most_tokens(prompts: Iterable[Prompt]) -> int:
    """Return an upper bound of the tokens of the longest prompt for any tokenizer, with room for
    normalisation that expands characters.
    """
    longest = max(len(text_of(prompt)) for prompt in prompts)
    return _TOKENS_PER_CHARACTER * longest + _SPECIAL_TOKENS
