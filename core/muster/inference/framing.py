"""A recipe's `[prompt]` and a model: what its chat template writes, pinned and checked.

Used by a run's owner before the run, and by anybody who compares a pinned recipe with a policy. A
template is a program, written by the maker of the model. Nobody else executes it. It runs in two
processes of bounded time, memory and output, with different hash seeds and addresses, and without
clock, randomness or files. Its input has marks in place of texts. So the frame that it writes
around the texts of a prompt is found once for a whole run and cannot depend on a problem, and a
text never passes through the template.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from muster.inference import policy_files
from muster.inference.prompts import encode_prompt
from muster.protocol.documents import first_fault
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, EngineError
from muster.protocol.prompts import Part
from muster.protocol.recipe import ChatFrame, PromptRecipe, Recipe
from muster.tasks.children import Child, ChildSilent
from muster.tasks.python_tool import FUNCTION


def pin_prompt(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its prompt's frame and the hash of the model's template. Blocks.

    A recipe that has them already is compared with the model. Raises ConfigError when the model's
    template is missing, unusable or not the one that the recipe pins, and when the model has no
    such token as the recipe's end of a thought or of a turn.
    """
    prompt = recipe.prompt
    if prompt == PromptRecipe():
        return recipe
    tokenizer = read_tokenizer(folder)
    if prompt.answer_after:
        _require_token(tokenizer, prompt.answer_after)
    if prompt.form == "plain":
        return recipe
    template = _template(tokenizer, folder)
    if prompt.template_hash not in ("", template.hash):
        raise ConfigError(
            f"the chat template of {folder} has hash {template.hash}, the recipe pins "
            f"{prompt.template_hash}",
            hint="put the pinned template into chat_template.jinja, or leave out the hash",
        )
    frame = frame_of(template, prompt)
    if prompt.frame not in (ChatFrame(), frame):
        raise ConfigError(
            f"the chat template of {folder} writes another frame than the recipe pins",
            hint="leave out prompt.frame: creating a run fills it in",
        )
    pinned = prompt.model_copy(update={"template_hash": template.hash, "frame": frame})
    return recipe.model_copy(update={"prompt": pinned})


def read_tokenizer(folder: Path) -> Any:
    """Return a model's tokenizer; raises ConfigError."""
    try:
        return policy_files.read_tokenizer(folder)
    except EngineError as error:
        raise ConfigError(str(error), hint=error.hint) from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer of {folder} does not load: {error}") from error


def read_ends(tokenizer: Any, folder: Path) -> frozenset[int]:
    """Return the ids that end the completions of a folder's model, as engines do; raises
    ConfigError.
    """
    try:
        config = policy_files.read_config(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the configuration of {folder} does not load: {error}") from error
    return policy_files.declared_ends(folder, config, tokenizer)


def _template(tokenizer: Any, folder: Path) -> ChatTemplate:
    found = tokenizer.chat_template
    # Some models have several, by name.
    source = found.get("default") if isinstance(found, dict) else found
    if not source:
        raise ConfigError(
            f"{folder} has no chat template",
            hint="put one into chat_template.jinja beside its tokenizer, or set prompt.form to "
            "'plain'",
        )
    named = tokenizer.special_tokens_map.items()
    return ChatTemplate(
        source,
        {name: text for name, text in named if isinstance(text, str)},
        tuple(map(str, tokenizer.convert_ids_to_tokens(sorted(read_ends(tokenizer, folder))))),
    )


def _require_token(tokenizer: Any, text: str) -> None:
    """Raise ConfigError unless a text is one token: answers are found among tokens, not letters."""
    found = encode_prompt(tokenizer, (Part(text, True),), is_start=False)
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        raise ConfigError(
            f"prompt.answer_after {text!r} is no token of the tokenizer",
            hint="name the token with which this model ends its thoughts, or leave it out",
        )


# --------------------------------------------------------- what a chat template writes

CPU_S = 3
"""CPU time that one process may take in all; a real template takes milliseconds."""
DEADLINE_S = 60.0
"""Wall-clock limit, the start of Python included."""
MEMORY_BYTES = 1 << 30
"""Address space of a process."""
MAX_CHARS = 65_536
"""A longer template, or output, is refused."""
HASH_SEEDS = ("0", "1")
"""PYTHONHASHSEED of the two processes; their addresses differ as well."""
_PROCESS = Path(__file__).with_name("template_process.py")

Message = dict[str, str]


class Conversation(NamedTuple):
    """A conversation that a template is asked to write."""

    messages: Sequence[Message]
    """Its messages."""
    goes_on: bool
    """Whether the beginning of the model's answer is written after them."""
    thinks: bool | None
    """The thinking switch; None leaves it as it is."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that the model may call, as JSON Schema."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's template, as its tokenizer has it."""

    source: str
    """The template, in Jinja."""
    special_tokens: Mapping[str, str]
    """Special tokens that it can refer to by name, such as `bos_token`."""
    ends: tuple[str, ...]
    """Texts of the tokens that end the model's completions."""

    @property
    def hash(self) -> str:
        """Keccak-256 of its UTF-8 text."""
        return hex0x(keccak(self.source.encode(errors="surrogatepass")))


def _mark(number: int) -> str:
    # Characters of the private use area: no filter changes them, and no template writes them.
    return f"\ue000{number}\ue001"


SYSTEM, ASKED, TURN, REPLY, NEXT_TURN, NEXT_REPLY = (_mark(i) for i in range(6))


def frame_of(template: ChatTemplate, prompt: PromptRecipe) -> ChatFrame:
    """Return what a template writes around the texts of a recipe's prompts. Blocks.

    Raises ConfigError when the template fails, differs from time to time, has no place for a text,
    lacks a switch that the recipe sets, omits the tools, or ends turns with a token that ends no
    completion.
    """
    thinks = {"on": True, "off": False, "template": None}[prompt.thinking]
    tools = (FUNCTION,) if prompt.tools == "python" else ()
    opening = [_message("system", SYSTEM)] if prompt.has_system else []
    opening.append(_message("user", ASKED))
    turn = [_message("assistant", TURN)]
    asked = [
        Conversation(opening, True, thinks, tools),
        Conversation(opening + turn, False, thinks, tools),
    ]
    if prompt.reply_role != "none":
        once = opening + turn + [_reply(prompt.reply_role, REPLY)]
        again = [_message("assistant", NEXT_TURN), _reply(prompt.reply_role, NEXT_REPLY)]
        asked += [Conversation(each, True, thinks, tools) for each in (once, once + again)]
    if thinks is not None:
        asked.append(Conversation(opening, True, not thinks, tools))
    if tools:
        asked.append(Conversation(opening, True, thinks))
    first, closed, *replied = _rendered(template, asked)
    if tools and replied.pop() == first:
        raise _refused("does not tell the model of tools", "leave prompt.tools at 'none'")
    if thinks is not None and replied.pop() == first:
        raise _refused("has no thinking switch", "leave prompt.thinking at 'template'")
    begin, middle, end = _around_texts(first, prompt.has_system)
    found = {"begin": begin, "middle": middle, "end": end}
    _after_end(_split(closed, TURN)[1], template.ends)
    if replied:
        before, after = _around_reply(replied[0], TURN, REPLY)
        if (before, after) != _around_reply(replied[1], NEXT_TURN, NEXT_REPLY):
            raise _refused("writes something else around a second reply", _NO_REPLIES)
        found |= {"reply_begin": _after_end(before, template.ends), "reply_end": after}
    try:
        return ChatFrame(**found)
    except ValidationError as error:
        raise _refused(f"writes what no recipe can pin: {first_fault(error)}") from error


_NO_REPLIES = "another prompt.reply_role may do, or tasks that nobody replies to"


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _reply(role: str, content: str) -> Message:
    if role != "tool":
        return _message(role, content)
    # Templates of Mistral's family require an id of nine letters or digits.
    return {**_message(role, content), "name": "python", "tool_call_id": "000000000"}


def _around_texts(text: str, has_system: bool) -> tuple[str, str, str]:
    if not has_system:
        begin, end = _split(text, ASKED)
        return begin, "", end
    begin, rest = _split(text, SYSTEM)
    return (begin, *_split(rest, ASKED))


def _around_reply(text: str, turn: str, reply: str) -> tuple[str, str]:
    before, after = _split(_split(text, turn)[1], reply)
    if "\ue000" in before + after:
        raise _refused("moves texts when it is replied to", _NO_REPLIES)
    return before, after


def _after_end(text: str, ends: Sequence[str]) -> str:
    """Return what follows the token that ends a turn; raises ConfigError unless it ends one."""
    text = text.lstrip()
    end = max((each for each in ends if text.startswith(each)), key=len, default=None)
    if end is None:
        raise _refused(
            f"ends a turn with {text[:40]!r}, completions end with {', '.join(map(repr, ends))}",
            "add the token's id to eos_token_id in generation_config.json: a model that was taught "
            "this template would never stop",
        )
    return text.removeprefix(end)


def _split(text: str, mark: str) -> tuple[str, str]:
    """Return what is before and after a mark; raises ConfigError unless it is there once."""
    before, *after = text.split(mark)
    if len(after) != 1:
        name = {SYSTEM: "system text", ASKED: "problem's text"}.get(mark, "turn or reply")
        raise _refused(
            f"writes the {name} {len(after)} times, or cuts it, or out of order",
            "it must write each text whole and once: prompt.system may have to be empty",
        )
    return before, after[0]


def _refused(what: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"the chat template {what}", hint=hint)


# ------------------------------------------------------------------------------------- rendering


def _rendered(template: ChatTemplate, asked: Sequence[Conversation]) -> list[str]:
    """Return conversations as the template writes them."""
    if len(template.source) > MAX_CHARS:
        raise _refused(f"has {len(template.source)} characters, at most {MAX_CHARS} are read")
    request = {
        "source": template.source,
        "variables": [_variables(template, each) for each in asked],
        "max_chars": MAX_CHARS,
        "memory_bytes": MEMORY_BYTES,
        "cpu_s": CPU_S,
    }
    texts: list[str] | None = None
    for seed in HASH_SEEDS:
        answer = _asked(request, seed)
        if "fault" in answer:
            raise _refused(f"cannot be used: {answer['fault']}")
        if texts not in (None, answer["texts"]):
            raise _refused("does not write the same every time")
        texts = answer["texts"]
    assert texts is not None
    return texts


def _variables(template: ChatTemplate, asked: Conversation) -> dict[str, Any]:
    given: dict[str, Any] = {
        **template.special_tokens,
        "messages": asked.messages,
        "add_generation_prompt": asked.goes_on,
        "tools": list(asked.tools) or None,
        "documents": None,
    }
    if asked.thinks is None:
        return given
    # Templates know the thinking switch by one of these two names.
    return given | {"enable_thinking": asked.thinks, "thinking": asked.thinks}


def _asked(request: dict[str, Any], hash_seed: str) -> dict[str, Any]:
    statement = f"import runpy; runpy.run_path({str(_PROCESS)!r}, run_name='__main__')"
    child = Child(statement, hash_seed=hash_seed)
    try:
        child.send(request)
        return child.receive(time.monotonic() + DEADLINE_S)
    except (ChildSilent, BrokenPipeError):
        return {"fault": f"it takes more than {CPU_S} s of CPU time or {MEMORY_BYTES >> 20} MiB"}
    finally:
        child.close()
