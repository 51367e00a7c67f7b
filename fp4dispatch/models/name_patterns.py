"""Match module names with patterns of configurations and users, in time linear in the length of the name.

A pattern with the prefix ``re:`` is a regular expression. It must match from the start of the name, as in
compressed-tensors (``utils/match.py``). Other patterns are globs in which ``*`` also matches dots, as in ModelOpt. A
pattern without a wildcard is the exact name.

Configurations are untrusted, and Python's ``re`` can take exponential time: ``(.?){50}!`` never ends on one name. So
RE2 matches the expressions (https://github.com/google/re2/wiki/Syntax). It has no backreferences, no lookbehind and no
lookahead. Checkpoints do use lookaheads at the very start, as in ``re:^(?!.*experts).*``. These are matched one by one,
in linear time too. Everything else that RE2 lacks is refused. The classes for digits, word
characters and spaces are ASCII.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Any

from fp4dispatch.errors import InputError

MAX_PATTERN = 4096
"""Maximum length of an expression or glob, in characters."""

MAX_PATTERNS = 4096
"""Maximum number of expressions and globs in one list. Exact names do not count: they need one lookup."""

Match = Callable[[str], bool]

_LIMITS = "no backreferences, no lookbehind, lookahead only at the very start, no repeats above 1000"
_OPEN_REPEAT = re.compile(r"\{,\d*\}")
"""Python reads ``{,3}`` as ``{0,3}``, RE2 as literal characters."""


class NamePatterns:
    """Whether any of some patterns matches a name.

    Parameters
    ----------
    patterns
        Expressions, globs and names; a single string is one pattern.

    Raises
    ------
    InputError
        For an invalid regular expression, one that RE2 does not support, or too many patterns.
    """

    def __init__(self, patterns: str | Iterable[str]) -> None:
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        self.names = frozenset(pattern for pattern in patterns if is_name(pattern))
        tried = dict.fromkeys(pattern for pattern in patterns if pattern not in self.names)
        if len(tried) > MAX_PATTERNS:
            raise InputError(f"{len(tried)} patterns that are not exact names: at most {MAX_PATTERNS} are tried")
        self._tried = tuple(compile_pattern(pattern) for pattern in tried)

    def __call__(self, name: str) -> bool:
        """Return whether one of them matches."""
        return name in self.names or any(match(name) for match in self._tried)


def is_name(pattern: str) -> bool:
    """Whether a pattern is an exact name."""
    return not pattern.startswith("re:") and not any(letter in pattern for letter in "*?[")


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> Match:
    """Return a function that tells whether a pattern matches a name. Raises as :class:`NamePatterns`."""
    if is_name(pattern):
        return pattern.__eq__
    if len(pattern) > MAX_PATTERN:
        raise InputError(f"pattern {pattern[:80]!r}... has {len(pattern)} characters: at most {MAX_PATTERN}")
    if not pattern.startswith("re:"):
        glob = re.compile(translate(pattern))  # translate() makes each * non-backtracking
        return lambda name: glob.match(name) is not None
    text = pattern.removeprefix("re:")
    _check_syntax(pattern, text)
    lookaheads, rest = _split(pattern, text)
    conditions = [(_re2(pattern, body), wanted) for body, wanted in lookaheads]
    main = _re2(pattern, rest)

    def match(name: str) -> bool:
        try:
            return all(_found(condition, name) == wanted for condition, wanted in conditions) and _found(main, name)
        except UnicodeEncodeError:
            raise InputError(f"name {name[:80]!r} is not Unicode: patterns cannot be matched with it") from None

    return match


def _found(expression: Any, name: str) -> bool:
    return expression.match(name) is not None


def _check_syntax(pattern: str, text: str) -> None:
    """Require that Python accepts the expression too: the tools that wrote it use Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # FutureWarning: a later Python reads it differently
            re.compile(text)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise InputError(f"pattern {pattern[:120]!r} is not a regular expression: {error}") from None
    if _OPEN_REPEAT.search(text):
        raise InputError(f"pattern {pattern[:120]!r} has a repeat without a lower end: write {{0,n}} for {{,n}}")


def _re2(pattern: str, text: str) -> Any:
    try:
        import re2
    except ImportError as error:
        raise InputError(f"pattern {pattern[:120]!r} needs RE2 ({error}): pip install google-re2") from None
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeEncodeError) as error:
        raw = error.args[0]
        why = raw.decode(errors="replace") if isinstance(raw, bytes) else str(error)
        raise InputError(
            f"pattern {pattern[:120]!r} cannot be matched in linear time ({why}): expected {_LIMITS}; "
            "name the modules in another way"
        ) from None


def _split(pattern: str, text: str) -> tuple[list[tuple[str, bool]], str]:
    """Split the lookaheads at the start, each with whether it must match, from the rest."""
    lookaheads: list[tuple[str, bool]] = []
    rest = text
    while (body := rest.removeprefix("^")).startswith(("(?!", "(?=")):
        end, _ = _scan(body)
        lookaheads.append((body[3:end], body[2] == "="))
        rest = body[end + 1 :]
    if lookaheads and _scan(rest)[1]:
        raise InputError(
            f"pattern {pattern[:120]!r} has a lookahead in one branch only: put the branches into a group, "
            "(?!...)(?:a|b)"
        )
    return lookaheads, rest


def _scan(text: str) -> tuple[int, bool]:
    """Return where the first group ends, and whether a ``|`` lies outside all groups."""
    depth, position, end, branches = 0, 0, -1, False
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 1
        elif letter == "[":
            position = _class_end(text, position)
        elif letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
            end = position if depth == 0 and end < 0 else end
        branches |= letter == "|" and depth == 0
        position += 1
    return end, branches


def _class_end(text: str, start: int) -> int:
    """Return where a character class ends. A first ``]`` is a member of the class."""
    position = start + 1
    position += text[position : position + 1] == "^"
    position += text[position : position + 1] == "]"
    while text[position : position + 1] not in ("]", ""):
        position += 2 if text[position] == "\\" else 1
    return position
