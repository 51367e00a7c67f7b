"""How ``auto`` decides, as a page: the order of decisions from ``resolve``, and each rule of policy/rules.toml."""

from __future__ import annotations

import inspect
import re

from fp4dispatch.policy.catalogue import FACTS
from fp4dispatch.policy.resolve import resolve
from fp4dispatch.policy.rules import Rule, When, rules

GROUPS = (
    ("deny", "What is unsafe", "`auto` never chooses these. Where one is named, it runs with one warning."),
    ("prefer", "What goes first", "Backends are tried from left to right, rule by rule."),
)


def order() -> str:
    """Return the steps of ``resolve``, as its docstring has them."""
    found = re.search(r"The order is:\n\n(.*?)\n\n(?=\S)", inspect.getdoc(resolve) or "", re.DOTALL)
    if not found:
        raise SystemExit("the docstring of resolve() has no list behind 'The order is:'")
    steps = re.sub(r":[a-z]+:`~?(?:[\w.]+\.)?(\w+\.\w+|\w+)`", r"`\1`", found[1])
    return steps.replace("``", "`")


def condition(when: When) -> str:
    """Return when a rule holds, in words."""
    lists = (("GPU", when.archs), ("op", when.ops), ("scaling", when.scalings), ("capture", when.captures))
    parts = [f"{name} {' or '.join(f'`{value}`' for value in values)}" for name, values in lists if values]
    bounds = (
        ("M at most {:,}", when.m_max),
        ("smallest captured M at most {:,}", when.m_min_max),
    )
    parts += [text.format(value) for text, value in bounds if value is not None]
    if when.proven is not None:
        parts.append(f"barriers {'proven' if when.proven else 'not proven'} in the binary")
    if when.fp8_copy is not None:
        parts.append(f"`FP4DISPATCH_FP8_COPY` {'set' if when.fp8_copy else 'not set'}")
    parts += [f"{fact} `{bounds}`" for fact, bounds in when.versions if fact in FACTS]
    return "; ".join(parts)


def link(source: str) -> str:
    """Return where a rule was read, as a link from docs/reference/."""
    if source.startswith("https://"):
        return f"<{source}>"
    return f"[{source}](../../{source})"


def section(rule: Rule) -> str:
    """Return one rule: a heading to find it by, and all that the file says."""
    about = " &rarr; " if rule.verb == "prefer" else ", "
    lines = [f"### {rule.id}", "", f"{rule.because[0].upper()}{rule.because[1:]}.", ""]
    lines.append(f"- **Backends**: {about.join(f'`{name}`' for name in rule.backends)}")
    if rule.having:
        lines[-1] += f" (all that have `{rule.having}`)"
    lines.append(f"- **When**: {condition(rule.when)}")
    if rule.verb == "deny":
        lines.append(f"- **Code**: `{rule.code}`")
    if rule.fix:
        lines.append(f"- **What to do**: {rule.fix}")
    lines += [f"- `{name}`: {why}" for name, why in rule.others]
    if rule.worth is not None:
        lines.append(
            f"- **Worth**: {rule.worth:.0%}. Where predicted or tuned times say that it takes longer than coarser "
            "activations by more, these run"
        )
    lines += [f"- **Measured**: {figures}" for figures in map(str, rule.measured)]
    lines.append(f"- **Read in** {link(rule.source)}, {rule.checked}")
    return "\n".join(lines)


def policy() -> str:
    """Return all rules, first those about safety."""
    parts = []
    for verb, title, words in GROUPS:
        parts += [f"## {title}", words, *(section(rule) for rule in rules() if rule.verb == verb)]
    return "\n\n".join(parts)
