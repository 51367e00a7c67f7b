"""Which script of bench/ answers which question, as a table: from their docstrings and the records that they write."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
ABOUT = {
    "kernels alone": ("activations", "kernels_sm90", "kernels_w4", "kernels_w4_large", "kernels_w8", "ncu"),
    "layers and models": ("architectures", "breakable", "decoder", "generated_text", "tensor_parallel", "vllm_apply"),
    "accuracy": ("accuracy", "w4_error"),
    "what a user waits for": ("cold_jit", "cold_model", "first_command", "host_cost", "new_tokens"),
    "which kernel is chosen": (
        *("candidates", "launch_samples", "fit_speeds", "fit_corrections", "fit_launch_model", "judge_choices"),
        "carry_tables",
    ),
    "right results": ("evidence", "race", "sanitize", "soak"),
    "builds and proofs": ("compile_targets", "mutants", "proof_cost"),
}
"""What scripts are about, and these in the order of a reader."""


def kinds(name: str) -> set[str]:
    """Return the kinds of records that a script writes, itself or by a ``run`` that several share."""
    tree = ast.parse((BENCH / f"{name}.py").read_text("utf-8"))
    found = {*written(tree)}
    for node in ast.walk(tree):
        shared = isinstance(node, ast.ImportFrom) and str(node.module).startswith("bench.")
        if shared and "run" in {alias.name for alias in node.names}:
            found |= kinds(str(node.module).removeprefix("bench.").replace(".", "/"))
    return found


def written(tree: ast.Module) -> Iterator[str]:
    """Yield the kind of each ``records.write`` of a module, given as it is or as a constant."""
    constants = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "records.write":
            kind = node.args[1]
            yield str(kind.value if isinstance(kind, ast.Constant) else constants[ast.unparse(kind)])


def table() -> str:
    """Return the table of bench/README.md."""
    lines = ["| about | script | what it answers or does | records in `results/` |", "|---|---|---|---|"]
    for about, names in ABOUT.items():
        for name in names:
            text = ast.get_docstring(ast.parse((BENCH / f"{name}.py").read_text("utf-8"))) or ""
            said = text.partition("\n")[0].replace("``", "`")
            files = ", ".join(f"`{kind.replace(' ', '-')}-*`" for kind in sorted(kinds(name)))
            lines.append(f"| {about} | [{name}]({name}.py) | {said} | {files or '-'} |")
    return "\n".join(lines)
