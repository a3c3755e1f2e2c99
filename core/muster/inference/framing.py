"""A recipe's `[prompt]` and a model: what its chat template writes, pinned and checked.

For a run's owner before the run, and for whoever compares a pinned recipe with a policy. Executes
the model's template, see `muster.tasks.chat_template`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import AutoConfig

from muster.inference.policy_files import declared_ends
from muster.inference.prompts import encode_prompt
from muster.protocol.errors import ConfigError
from muster.protocol.prompts import Part
from muster.protocol.recipe import ChatFrame, PromptRecipe, Recipe
from muster.tasks.chat_template import ChatTemplate, frame_of


def pin_prompt(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its prompt's frame and the hash of the model's template. Blocks.

    A recipe that has them already is compared with the model. Raises ConfigError when the model's
    template is missing, another, unusable or not what the recipe pins; when a token that ends a
    thought or a turn is none of the model's.
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
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer of {folder} does not load: {error}") from error


def _ends(tokenizer: Any, folder: Path) -> frozenset[int]:
    """Return the ids that end the model's completions; raises ConfigError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the configuration of {folder} does not load: {error}") from error
    return declared_ends(folder, config, tokenizer)


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
        tuple(map(str, tokenizer.convert_ids_to_tokens(sorted(_ends(tokenizer, folder))))),
    )


def _require_token(tokenizer: Any, text: str) -> None:
    """Raise ConfigError unless a text is one token: answers are found among tokens, not letters."""
    found = encode_prompt(tokenizer, (Part(text, True),), is_start=False)
    if len(found) != 1 or found[0] == tokenizer.unk_token_id:
        raise ConfigError(
            f"prompt.answer_after {text!r} is no token of the tokenizer",
            hint="name the token with which this model ends its thoughts, or leave it out",
        )
