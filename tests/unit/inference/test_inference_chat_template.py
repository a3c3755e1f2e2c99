"""Frames of templates in the form of known families, and templates that are refused."""

from typing import Any

import pytest
from worlds.chat_world import template_of

from muster.inference import framing
from muster.inference.framing import ChatTemplate, frame_of
from muster.protocol.errors import ConfigError
from muster.protocol.recipe import ChatFrame, PromptRecipe

ON = {"thinking": "on", "answer_after": "</think>"}
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
KNOWN = "Knowledge ends in December 2023. Today is 26 Jul 2024.\n\n"
LLAMA_END = "<|eot_id|>" + HEADER.format("assistant")
QWEN_END = "<|im_end|>\n<|im_start|>assistant\n"

PYTHON = (
    '{"type": "function", "function": {"name": "python", "description": "Runs a Python program and '
    'returns what it prints.", "parameters": {"type": "object", "properties": {"code": {"type": '
    '"string", "description": "The program."}}, "required": ["code"]}}}'
)
GOLDEN: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("qwen", {}, ("<|im_start|>user\n", "", QWEN_END, "", "")),
    (
        "qwen",
        {"system": "S", **ON},
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", QWEN_END, "", ""),
    ),
    (
        "qwen",
        {"thinking": "off"},
        ("<|im_start|>user\n", "", f"{QWEN_END}<think>\n\n</think>\n\n", "", ""),
    ),
    (
        "qwen",
        {"reply_role": "tool", **ON},
        (
            "<|im_start|>user\n",
            "",
            QWEN_END,
            "\n<|im_start|>user\n<tool_response>\n",
            f"\n</tool_response>{QWEN_END}",
        ),
    ),
    (
        "qwen",
        {"system": "S", "tools": "python", "reply_role": "tool"},
        (
            "<|im_start|>system\n",
            f"\n\nYou may call these tools:\n<tools>\n{PYTHON}\n</tools>\nWrite a call as "
            '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\n'
            "<|im_start|>user\n",
            QWEN_END,
            "\n<|im_start|>user\n<tool_response>\n",
            f"\n</tool_response>{QWEN_END}",
        ),
    ),
    (
        "mistral",
        {"tools": "python", "reply_role": "tool"},
        (
            f"<s>[AVAILABLE_TOOLS] [{PYTHON}][/AVAILABLE_TOOLS][INST] ",
            "",
            "[/INST]",
            "[TOOL_RESULTS] ",
            "[/TOOL_RESULTS]",
        ),
    ),
    (
        "llama",
        {"system": "S", "reply_role": "tool"},
        (
            f"<|begin_of_text|>{HEADER.format('system')}{KNOWN}",
            f"<|eot_id|>{HEADER.format('user')}",
            LLAMA_END,
            HEADER.format("ipython"),
            LLAMA_END,
        ),
    ),
    (
        "llama",
        {"reply_role": "user"},
        (
            f"<|begin_of_text|>{HEADER.format('system')}{KNOWN}<|eot_id|>{HEADER.format('user')}",
            "",
            LLAMA_END,
            HEADER.format("user"),
            LLAMA_END,
        ),
    ),
    ("mistral", {"system": "S"}, ("<s>[INST] ", "\n\n", "[/INST]", "", "")),
    (
        "mistral",
        {"reply_role": "tool"},
        ("<s>[INST] ", "", "[/INST]", "[TOOL_RESULTS] ", "[/TOOL_RESULTS]"),
    ),
]
"""Frames by family and `[prompt]`, written by hand."""


@pytest.mark.parametrize(("family", "prompt", "frame"), GOLDEN)
def test_frames_of_known_families(family: str, prompt: dict[str, Any], frame: tuple[str]) -> None:
    found = frame_of(template_of(family), PromptRecipe(form="chat", **prompt))
    assert found == ChatFrame(**dict(zip(ChatFrame.model_fields, frame, strict=True)))


def made_of(source: str, **prompt: Any) -> ChatFrame:
    template = ChatTemplate(source, {"eos_token": "<e>"}, ("<e>",))
    return frame_of(template, PromptRecipe(form="chat", **prompt))


EACH = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
"""The smallest template."""


def test_the_least_template_is_taken() -> None:
    assert made_of(EACH, reply_role="user") == ChatFrame(end="<e>", reply_end="<e>")


def test_marks_of_what_is_trained_on_write_nothing() -> None:
    assert made_of(f"{{% generation %}}{EACH}{{% endgeneration %}}") == made_of(EACH)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ strftime_now('%Y') }}" + EACH, "strftime_now' is undefined"),
        ("{% include '/etc/passwd' %}" + EACH, "no loader"),
        ("{% import '/etc/passwd' as p %}" + EACH, "no loader"),
        ("{% for i in range(10**9) %}{% endfor %}" + EACH, "Range too big"),
        ("{{ 'x' * 10**10 }}" + EACH, "MemoryError"),
        ("{{ 'x' * 10**5 }}" + EACH, "more than 65536 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + EACH, "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}" + EACH, "unsafe"),
        ("{{ messages.append(1) }}" + EACH, "unsafe"),
        ("{{ [1, 2] | random }}" + EACH, "No filter named 'random'"),
        ("{{ lipsum() }}" + EACH, "lipsum' is undefined"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception }}" + EACH, "does not write the same every time"),
        ("{{ cycler(1) }}" + EACH, "does not write the same every time"),
        ("{{ messages[0].content | length }}<e>", "problem's text 0 times"),
        (EACH + EACH, "problem's text 2 times"),
        ("{% for m in messages %}{{ m.content[1:] }}{% endfor %}<e>", "problem's text 0 times"),
        ("{% for m in messages %}{{ m.content }}<eot>{% endfor %}", "ends a turn with '<eot>'"),
        (EACH + "\x1b[2J", "control character"),
        ("{% if 0 %}" + "x" * 70_000 + "{% endif %}" + EACH, "at most 65536 are read"),
    ],
)
def test_what_could_hang_differ_or_reach_out_is_refused(source: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        made_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_endless_work_is_ended_by_its_cpu_time(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "CPU_S", 1)
    with pytest.raises(ConfigError, match="more than 1 s of CPU time"):
        made_of(source + EACH)


def test_a_template_without_a_place_for_the_system_text_is_refused() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}<e>{% endfor %}"
    with pytest.raises(ConfigError, match="system text 0 times"):
        made_of(source, system="S")


@pytest.mark.parametrize("thinking", [{"thinking": "off"}, ON])
def test_a_switch_that_the_template_lacks_is_refused(thinking: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no thinking switch"):
        made_of(EACH, **thinking)


def test_a_template_that_leaves_tools_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not tell the model of tools"):
        made_of(EACH, tools="python", reply_role="user")


def test_a_system_text_that_moves_with_replies_is_refused() -> None:
    with pytest.raises(ConfigError, match="moves texts"):
        frame_of(template_of("mistral"), PromptRecipe(form="chat", system="S", reply_role="user"))


def test_a_second_reply_that_is_framed_otherwise_is_refused() -> None:
    source = "{% for m in messages %}{{ loop.index }}{{ m.content }}<e>{% endfor %}"
    with pytest.raises(ConfigError, match="second reply"):
        made_of(source, reply_role="user")


def test_the_hash_is_of_the_text() -> None:
    assert template_of("qwen").hash != template_of("llama").hash
    assert len(template_of("qwen").hash) == 66
