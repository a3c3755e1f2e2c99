"""A model's prompt for a problem's text, and the valid `[prompt]` sections of recipes."""

from typing import Any

import pytest
from pydantic import ValidationError

from muster.protocol.errors import EncodingError
from muster.protocol.prompts import Part, render_prompt, render_reply, text_of
from muster.protocol.recipe import ChatFrame, PromptRecipe, Recipe, SamplingRecipe, TrainingRecipe

PLAIN = PromptRecipe()
FRAME = ChatFrame(begin="<a>", middle="<b>", end="<c>", reply_begin="<d>", reply_end="<e>")
CHAT = PromptRecipe(form="chat", frame=FRAME)
REQUEST = "Think for 2000 tokens before giving a response."


def recipe(target_lengths: tuple[int, ...] = (), **prompt: Any) -> Recipe:
    sampling = SamplingRecipe(
        problems_per_submission=1,
        samples_per_problem=2,
        temperature=1.0,
        max_new_tokens=8,
        target_lengths=target_lengths,
    )
    training = TrainingRecipe(submissions_per_step=1)
    return Recipe(name="-", sampling=sampling, training=training, prompt=PromptRecipe(**prompt))


def test_a_plain_prompt_is_the_problem_s_text() -> None:
    assert render_prompt("3172=", -1, PLAIN) == "3172="
    assert render_reply("5", PLAIN) == "5"


def test_a_length_is_asked_for_after_the_text() -> None:
    assert render_prompt("Why?", 2000, PLAIN) == f"Why?\n\n{REQUEST}"
    assert text_of(render_prompt("Why?", 2000, CHAT)) == f"<a>Why?\n\n{REQUEST}<c>"


def test_a_length_is_asked_for_in_the_system_text() -> None:
    asking = CHAT.model_copy(update={"length_request": "system"})
    assert text_of(render_prompt("Why?", 2000, asking)) == f"<a>{REQUEST}<b>Why?<c>"
    polite = asking.model_copy(update={"system": "Be kind."})
    assert text_of(render_prompt("Why?", 2000, polite)) == f"<a>Be kind.\n\n{REQUEST}<b>Why?<c>"


def test_texts_of_a_chat_prompt_are_no_markup() -> None:
    prompt = render_prompt("Why?", -1, CHAT.model_copy(update={"system": "S"}))
    assert prompt == (
        Part("<a>", True), Part("S", False), Part("<b>", True), Part("Why?", False),
        Part("<c>", True),
    )  # fmt: skip
    assert render_reply("5", CHAT) == (Part("<d>", True), Part("5", False), Part("<e>", True))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"system": "S"}, "system is for form 'chat'"),
        ({"thinking": "off"}, "thinking is for form 'chat'"),
        ({"reply_role": "tool"}, "reply_role is for form 'chat'"),
        ({"tools": "python"}, "tools is for form 'chat'"),
        ({"form": "chat", "tools": "python"}, "tools need reply_role"),
        ({"form": "chat", "thinking": "on"}, "needs answer_after"),
        ({"form": "chat", "thinking": "off", "answer_after": "</think>"}, "nothing for answer_"),
        ({"form": "chat", "length_request": "system"}, "needs sampling.target_lengths"),
        ({"form": "chat", "system": "a\rb"}, "control character"),
        ({"form": "chat", "answer_after": "a\nb"}, "control character"),
        ({"form": "html"}, "plain"),
    ],
)
def test_settings_that_do_not_fit_are_refused(prompt: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        recipe(**prompt)


def test_a_recipe_with_a_frame_survives_a_round_trip() -> None:
    frame = ChatFrame(begin="<|im_start|>user\n", end="<|im_end|>\n\t")
    made = recipe((5, 7), form="chat", length_request="system", system="one\ntwo", frame=frame)
    assert Recipe.from_bytes(made.to_bytes()) == made


def test_a_recipe_of_the_first_version_has_plain_prompts() -> None:
    first = recipe().model_copy(update={"schema_version": 1})
    assert b"prompt" not in first.to_bytes()
    assert Recipe.from_bytes(first.to_bytes()).prompt == PLAIN
    chat = recipe(form="chat").to_bytes()
    with pytest.raises(EncodingError, match="prompt came with schema version 2"):
        Recipe.from_bytes(chat.replace(b'schema_version":4', b'schema_version":1'))
