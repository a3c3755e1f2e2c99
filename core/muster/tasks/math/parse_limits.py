r"""Limits on expressions before they are parsed, because a parser may hang on some.

All limits are on the text alone, so that every machine refuses the same expressions. They leave
room for answers that people write; a gold answer beyond them is not admitted.
"""

import re

MAX_DIGITS = 64
"""Most digits of a numeral."""
MAX_DEPTH = 12
"""Deepest nesting of brackets."""
MAX_COMMANDS = 64
"""Most LaTeX commands in one expression."""
MAX_POWER = 5000
"""Largest exponent of a numeral."""
MAX_SYMBOLIC_POWER = 30
"""Largest exponent of anything else."""
MAX_POWERS = 4096
"""Largest product of all exponents of bases that are not numerals."""
MAX_FUNCTIONS = 8
"""Most function calls (sine, logarithm and so on) in one expression."""
MAX_FACTORIAL = 200
"""Largest factorial of a numeral; otherwise only a variable may have one."""
MAX_BINOMIAL = 1000
"""Largest numeral in an expression with a binomial coefficient."""

_COMMAND_NAMES = """
    frac sqrt pi pm mp cdot times div sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh
    log ln lg exp infty in cup cap le ge ne alpha beta delta theta lambda mu phi varphi omega sigma
    tau rho epsilon varepsilon binom begin end overline bar vec hat mathbb mathbf lfloor rfloor
    lceil rceil lvert rvert vert mid text max min gcd lcm equiv emptyset setminus circ prime ldots
    cdots dots boldsymbol langle rangle Delta Omega Phi nabla
"""
_COMMANDS = frozenset(_COMMAND_NAMES.split())
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.ASCII)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{([a-z]*)\}", re.ASCII)
_NUMERAL = re.compile(r"[0-9]+", re.ASCII)
_POWER = re.compile(r"(.)\^\{?[-+(]*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)", re.ASCII)
_FUNCTION = re.compile(
    r"\\(?:[a-z]*(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp)(?![a-zA-Z])", re.ASCII
)
_DEEP_POWER = re.compile(r"\^\{[^{}]*\^\{[^{}]*\^|\^[^{}]\^[^{}]\^", re.ASCII)
_NESTED_POWER = re.compile(r"\^(?:\{[^{}]*\^|[^{} ]\^|\{?[-+]?[0-9]+\}?\^)", re.ASCII)
_FACTORIAL = re.compile(r"([0-9]+|.)!", re.ASCII)


def refusal(text: str) -> str | None:
    """Return why an expression is not passed to the symbolic engine; None if it is."""
    return next((reason for check in _CHECKS if (reason := check(text))), None)


def _check_words(text: str) -> str | None:
    commands = _COMMAND.findall(text)
    if len(commands) > MAX_COMMANDS:
        return f"more than {MAX_COMMANDS} commands"
    unknown = next((c for c in commands if c not in _COMMANDS and c not in "{}\\|%"), None)
    if unknown:
        return f"the command {unknown!r} is none of an answer"
    foreign = next((e for e in _ENVIRONMENT.findall(text) if e != "pmatrix"), None)
    return f"the environment {foreign!r} is none of an answer" if foreign is not None else None


def _check_depth(text: str) -> str | None:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return f"brackets nest deeper than {MAX_DEPTH}" if deepest > MAX_DEPTH else None


def _check_numerals(text: str) -> str | None:
    numerals = _NUMERAL.findall(text)
    if any(len(numeral) > MAX_DIGITS for numeral in numerals):
        return f"a numeral of more than {MAX_DIGITS} digits"
    if "\\binom" in text and any(int(numeral) > MAX_BINOMIAL for numeral in numerals):
        return f"a binomial coefficient of numbers above {MAX_BINOMIAL}"
    return None


def _check_powers(text: str) -> str | None:
    if _NESTED_POWER.search(text) and not re.search("[a-zA-Z]", _COMMAND.sub("", text)):
        return "a tower of powers"
    if _DEEP_POWER.search(text) or text.count("^") > 16:
        return "a tower of powers"
    product = 1.0
    for base, exponent in _POWER.findall(text):
        limit = MAX_POWER if base.isdigit() else MAX_SYMBOLIC_POWER
        size = float(exponent[:20])
        if size > limit:
            return f"an exponent above {limit}"
        product *= 1 if base.isdigit() else max(1.0, size)
    return f"exponents whose product is above {MAX_POWERS}" if product > MAX_POWERS else None


def _check_functions(text: str) -> str | None:
    count = len(_FUNCTION.findall(text))
    return f"more than {MAX_FUNCTIONS} functions" if count > MAX_FUNCTIONS else None


def _check_factorials(text: str) -> str | None:
    for operand in _FACTORIAL.findall(text):
        is_numeral = operand.isascii() and operand.isdigit() and len(operand) <= 3
        if not (operand.isalpha() or (is_numeral and int(operand) <= MAX_FACTORIAL)):
            return f"a factorial of more than {MAX_FACTORIAL}"
    return None


_CHECKS = (
    _check_words,
    _check_depth,
    _check_numerals,
    _check_powers,
    _check_functions,
    _check_factorials,
)
