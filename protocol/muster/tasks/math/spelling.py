r"""One spelling for what LaTeX and Unicode write in many; what it means is decided elsewhere.

Only signs of a fixed list are read beyond ASCII. A look-alike (a full-width digit, a Cyrillic
letter) is none of them, so it equals nothing.
"""

from __future__ import annotations

import re

_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
    "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ",
    "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "√": r"\sqrt ",
}  # fmt: skip
_TRANSLATION = str.maketrans(_SIGNS)

_REWRITES = tuple(
    (re.compile(pattern, re.ASCII), into)
    for pattern, into in (
        (
            r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|textstyle|limits)(?![a-zA-Z])",
            "",
        ),
        (r"\\[!,;: ]|\\q?quad(?![a-zA-Z])|~|\\\(|\\\)|\\\[|\\\]|(?<!\\)\$", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|mathit)\{", r"\\text{"),
        (r"\\%", "%"),
        (r"\^\{\\circ\s*\}|\^\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"\\text{degree}"),
        (r"\\begin\{[bvV]?matrix\}", r"\\begin{pmatrix}"),
        (r"\\end\{[bvV]?matrix\}", r"\\end{pmatrix}"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*\{([^{}]*)\}\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"_([0-9a-zA-Z]) ", r"_{\1}"),
        (r"\{,\}", ","),
        # Groups of three: 1 000 000.
        (
            r"(?<![0-9.,])([0-9]{1,3}) ([0-9]{3})(?: ([0-9]{3}))?(?: ([0-9]{3}))?(?![0-9])",
            r"\1\2\3\4",
        ),
        (r"\s+", " "),
        (r" ?([-+*/^()\[\]=<>|]) ?", r"\1"),
        (r" (?=[,}\\])|(?<=\{) ", ""),
        (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),
    )
)


def respell(text: str) -> str | None:
    """Return the text in one spelling; None when it holds a sign that is not in the list."""
    text = text.translate(_TRANSLATION)
    if not text.isascii() or "\x00" in text:
        return None
    for pattern, into in _REWRITES:
        text = pattern.sub(into, text)
    text = text.replace("\\$", "").strip()
    return text.rstrip(".;:").strip() if text[-1:] in ".;:" else text
