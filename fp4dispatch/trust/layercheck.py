"""Check the layer that is bound: its weights, its sizes, its launches.

The canaries (:mod:`fp4dispatch.trust.trial`) are small. This check finds faults of larger sizes, and rare ones. For
each backend of a layer it runs three numbers of tokens that the backend serves: the first (mostly 1), a ragged one, and
the largest that fits into memory. Each output lies in poisoned memory with guards on both sides.

* Every element is checked for poison and NaN, and the guards for writes.
* Sampled tiles are compared with exact products of the same weights (:mod:`fp4dispatch.trust.layer_operands`): all
  combinations of up to four row tiles and six column tiles of 128, with the first and the last among them. In other
  tiles, wrong values show only where a repeat has other bits.
* Calls are repeated as the layer makes them, and must be equal in every bit: 256 times for the first number of tokens,
  8 for the ragged one, 2 for the largest. A random fault in one of 50 calls is then missed with probability
  0.98^256 = 0.6 %. Slow calls are repeated less often; the verdict says how often.

Limits on a GPU: 300 ms and 64 MB, for each shape, backend and GPU model. The backend's own memory for a launch is
extra; the layer needs it anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, Ready, rows_for
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import reasons_of
from fp4dispatch.problem import Problem
from fp4dispatch.trust.canary import FP16_UNDERFLOW, UNIT_ROUNDOFF
from fp4dispatch.trust.layer_operands import Answer, Operands
from fp4dispatch.trust.tilecheck import TILE, Finding, Poisoned
from fp4dispatch.trust.trial import Outcome, finish, plain_torch, planned

MEMORY = 54 << 20
"""Bytes for everything but the weights: the operands of the largest number of tokens, answers and comparisons."""
_ANSWERS = 18 << 20
"""Part of it for answers and comparisons."""
MOST_TOKENS = {"cuda": 2048, "cpu": 288}
_RAGGED = 133
"""One row tile and five rows."""
REPEATS = (256, 8, 2)
_SECONDS = {"cuda": 0.06, "cpu": 0.5}
"""Time limit for the repeats of one number of tokens."""
_BATCH = 16
"""Repeats between two readings of the clock."""
_ROW_TILES, _COLUMN_TILES = 4, 6

TILE_ERROR = 0.03
"""Largest root-mean-square error of a tile, relative to the root-sum-square of the products' terms. Real kernels stay
below 0.006; a dropped tail of 16 elements of K gives 0.2 or more, a dropped bias 1."""
LINE_ERROR = 0.05
"""The same for a row or a column of a tile, of at least 16 elements."""
ELEMENT_ERROR = 0.12
"""The same for one element."""
_TRUNCATED = 2.0**-14 / 32
"""Error that truncated sums of FP8 tensor cores add, a K element (:data:`fp4dispatch.trust.canary.ACCUMULATE`)."""
_LEAST_LINE = 16
_MUCH = 1e6
_FLOAT16_HOLDS = 6e4
_CHUNK = 1 << 20
"""Elements of an output that are checked at a time."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The subject of a check: a layer on one backend.

    ``problem``: with the activation format resolved, any M. ``first``, ``last``: the range of tokens that the backend
    serves in this layer. ``weights``: canonical. ``prepared``: the same in the backend's layout. ``dtype``: of x and
    the output.
    """

    backend: Backend
    problem: Problem
    first: int
    last: int
    weights: LinearWeights
    prepared: Prepared
    dtype: torch.dtype

    def __str__(self) -> str:
        p = self.problem
        bias = " + bias" if p.bias else ""
        return f"N={p.n} K={p.k} -> {p.out_dtype}{bias}, M={self.first}..{self.last}"


def tokens(subject: Subject, device: str) -> tuple[int, ...]:
    """Return the numbers of tokens to run, ascending and distinct. The largest is the largest that fits into memory."""
    p, size = subject.problem, subject.dtype.itemsize
    row = p.k * size + p.n * size + 2 * p.k  # x, out, and what a backend may write of x
    fits = max((MEMORY - _ANSWERS) // row, 1)
    large = min(subject.last, fits, MOST_TOKENS.get(device, MOST_TOKENS["cpu"]))
    if large <= subject.first:
        return (large,)
    if large > 2 * TILE + 64:
        large = large // 64 * 64
    first = subject.first
    ragged = min(_RAGGED, first + (large - first) // 2 | 1, large)
    return tuple(sorted({first, ragged, large}))


def run(subject: Subject, system: System, seed: int = 0) -> Outcome:
    """Check a layer on one backend. Synchronises the device.

    Raises
    ------
    CaptureError
        If the backend refuses to plan because a CUDA graph is being captured.
    """
    outcome = Outcome()
    device = subject.weights.weight.device
    with plain_torch(device):
        sizes = tokens(subject, device.type)
        while sizes:
            outcome.short_of_memory = outcome.stopped = False
            check = _draw(subject, system, device, seed, sizes, outcome)
            if check is not None:
                check.run(outcome)
            if not outcome.short_of_memory:
                break
            sizes = sizes[:-1]
            del check
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return outcome


def _draw(
    subject: Subject, system: System, device: torch.device, seed: int, sizes: tuple[int, ...], outcome: Outcome
) -> _Check | None:
    """Draw operands and compute their answers. A failure here is not the backend's fault."""
    try:
        return _Check(subject, system, device, seed, sizes)
    except (torch.OutOfMemoryError, MemoryError) as error:
        outcome.notes.append(f"M={sizes[-1]}: memory ran out: {error}")
        outcome.short_of_memory = outcome.stopped = True
    except RuntimeError as error:
        if "CUDA error" in str(error):
            raise
        outcome.notes.append(f"answers could not be computed: {error}")
        outcome.stopped = True
    outcome.lasting = False
    return None


class _Check:
    """One pass over all numbers of tokens. If memory runs out, a smaller pass follows."""

    def __init__(
        self, subject: Subject, system: System, device: torch.device, seed: int, sizes: tuple[int, ...]
    ) -> None:
        self.subject, self.system, self.device, self.sizes = subject, system, device, sizes
        operands = Operands(subject.weights, subject.problem.activation, subject.dtype, seed)
        self.x = operands.x(max(sizes[-1], 2))  # two inputs for one token
        self.bias = operands.bias() if subject.problem.bias else None
        rows = _sample(self.x.shape[0], _ROW_TILES, seed, near=1)
        columns = _sample(subject.problem.n, _COLUMN_TILES, seed)
        self.answer = operands.answer(self.x, rows.to(device), columns.to(device))

    def run(self, outcome: Outcome) -> None:
        """Run every number of tokens until one is wrong."""
        backend, prepared = self.subject.backend, self.subject.prepared
        for m, repeats in zip(self.sizes, REPEATS, strict=False):
            name = f"M={m} N={self.subject.problem.n} K={self.subject.problem.k}"
            if outcome.stopped or outcome.findings or any(ran.startswith(f"{name} ") for ran in outcome.ran):
                continue
            problem = replace(self.subject.problem, m=m)
            with outcome.of(name):
                if reasons := reasons_of(backend, problem, self.system):
                    outcome.notes.append(f"{name}: {'; '.join(reason.sentence() for reason in reasons)}")
                    continue
                with outcome.building():
                    plan = planned(backend, problem, prepared)
                    finish(self.device)
                try:
                    calls, found = self._run(plan, m, repeats, name)
                finally:
                    backend.release(plan)
                outcome.findings += [found] if found else []
                outcome.ran.append(f"{name} ({calls} calls)")

    def _run(self, plan: Plan, m: int, repeats: int, name: str) -> tuple[int, Finding | None]:
        """Return the number of calls, and the fault if there is one."""
        inputs = [self.x[:m].clone() if m < self.x.shape[0] else self.x]
        if 2 * m <= min(self.x.shape[0], 2 * TILE):  # two inputs in turn: a stale output shows
            inputs.append(self.x[m : 2 * m].clone())
        backend, prepared = self.subject.backend, self.subject.prepared
        rows = rows_for(backend, plan, m)
        target = Poisoned(m, self.subject.problem.n, self.subject.dtype, self.device, rows)
        firsts = []
        for i, x in enumerate(inputs):
            target.poison()
            backend.run(plan, prepared, x, target.whole, self.bias)
            if found := self._judge(name, target, i * m, m):
                return i + 1, found
            firsts.append(_fingerprint(target))
        done, differ = self._repeat(backend.ready(plan, prepared), target, inputs, firsts, repeats)
        if not differ:
            return len(inputs) + done, None
        detail = f"{differ} of {done} calls gave other bits than the first call with the same input"
        return len(inputs) + done, Finding(name, "not repeatable", detail)

    def _repeat(
        self, ready: Ready, target: Poisoned, inputs: list[Tensor], firsts: list[Tensor], repeats: int
    ) -> tuple[int, int]:
        """Return the number of repeats, and how many differed from the first call, guards included."""
        differ = torch.zeros((), dtype=torch.int64, device=self.device)
        started, done = time.perf_counter(), 0
        while done < repeats and time.perf_counter() - started < _SECONDS.get(self.device.type, _SECONDS["cpu"]):
            for _ in range(min(_BATCH, repeats - done)):
                which = done % len(inputs)
                target.poison()
                ready(inputs[which], target.whole, self.bias)
                differ += (_fingerprint(target) != firsts[which]).any()
                done += 1
            finish(self.device)
        return done, int(differ)

    def _judge(self, name: str, target: Poisoned, first_row: int, m: int) -> Finding | None:
        """Return the fault of one output, whose rows are those of x from ``first_row`` on."""
        stray, never, bad = _everywhere(target)
        total = target.out.numel()
        if stray:
            return Finding(name, "outside", f"{stray} elements outside the output were written")
        if never:
            flat = (target.out.reshape(-1).view(target.bits) == target.value).to(torch.uint8)
            row, column = divmod(int(flat.argmax()), target.out.shape[1])
            tile = (row // TILE, column // TILE)
            return Finding(name, "never written", f"was not written; in all {never} of {total} elements were not", tile)
        if bad:
            return Finding(name, "NaN", f"{bad} of {total} elements are NaN or infinite")
        here = (self.answer.rows >= first_row) & (self.answer.rows < first_row + m)
        answer = Answer(
            self.answer.rows[here] - first_row, self.answer.columns, self.answer.product[here], self.answer.size[here]
        )
        return _compare(name, target.out, answer, self.bias, self.subject)


def _fingerprint(target: Poisoned) -> Tensor:
    """Return the sums of the bits of each row and column of an output, and of its guards. Does not synchronise.

    A change of one element changes two sums.
    """
    bits = target.out.view(target.bits)
    by_row = []
    by_column = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    step = max(1, _CHUNK // bits.shape[1])
    for start in range(0, bits.shape[0], step):  # CUDA sums 16-bit integers by widening all of them first
        part = bits[start : start + step].to(torch.int64)
        by_row.append(part.sum(1))
        by_column += part.sum(0)
    guards = torch.stack([guard.sum(dtype=torch.int64) for guard in target.guards()])
    return torch.cat([by_column, *by_row, guards])


def _everywhere(target: Poisoned) -> tuple[int, int, int]:
    """Return three counts: guard elements written, elements not written, elements not finite. Synchronises."""
    out = target.out.view(-1)
    counts = torch.zeros(3, dtype=torch.int64, device=out.device)
    for guard in target.guards():
        counts[0] += (guard != target.value).sum()
    for start in range(0, out.numel(), _CHUNK):
        values = out[start : start + _CHUNK]
        counts[1] += (values.view(target.bits) == target.value).sum()
        # float16 may overflow where a static scale fixes the size of x: then the sampled tiles decide
        counts[2] += (values.isnan() if values.dtype == torch.float16 else ~values.isfinite()).sum()
    stray, never, bad = counts.tolist()
    return stray, never, bad


def _sample(size: int, tiles: int, seed: int, near: int = 0) -> Tensor:
    """Return indices of some tiles of 128: the first, the next ``near``, the last, and random others."""
    count = -(-size // TILE)
    draw = torch.Generator(device="cpu").manual_seed(seed)
    shuffled = torch.randperm(count, generator=draw, device="cpu").tolist()
    wanted = dict.fromkeys(i for i in (0, *range(1, near + 1), count - 1, *shuffled) if i < count)
    starts = [i * TILE for i in sorted(list(wanted)[:tiles])]
    parts = [torch.arange(i, min(i + TILE, size), dtype=torch.int64, device="cpu") for i in starts]
    return torch.cat(parts)


# ------------------------------------------------------------------------------------------------------- sampled tiles


def _compare(name: str, out: Tensor, answer: Answer, bias: Tensor | None, subject: Subject) -> Finding | None:
    """Compare the sampled tiles of an output with their answer. Synchronises."""
    error = torch.empty_like(answer.product)
    for start in range(0, error.shape[1], TILE):  # bounds the memory
        part = slice(start, start + TILE)
        error[:, part] = _errors(out, answer, part, bias)
    more = _TRUNCATED * subject.problem.k if subject.problem.activation != "bf16" else 0.0
    excess = _excess(error, answer, more)
    if not bool(torch.stack([part.amax() for part in excess.values()]).amax() > 1):
        return None
    return _finding(name, out, answer, excess, error, bias)


def _errors(out: Tensor, answer: Answer, part: slice, bias: Tensor | None) -> Tensor:
    """Return the errors of sampled elements, less one rounding of the product and one after the bias.

    Relative to the root-sum-square of the terms of the product.
    """
    columns, product = answer.columns[part], answer.product[:, part]
    got = out.index_select(1, columns).index_select(0, answer.rows).double()  # few columns first: rows are wide
    want = product if bias is None else product + bias.index_select(0, columns).double()
    rounding = 1.01 * UNIT_ROUNDOFF[out.dtype] * (product.abs() + want.abs()) + 1e-300
    if out.dtype == torch.float16:
        rounding += 2 * FP16_UNDERFLOW
        got = torch.where(want.abs() > _FLOAT16_HOLDS, want, got)
    off = ((got - want).abs() - rounding).clamp_(min=0)
    error = torch.where(off > 0, off / answer.size[:, part].clamp(min=1e-290), 0.0)
    return error.nan_to_num_(nan=_MUCH).clamp_(max=_MUCH)


def _excess(error: Tensor, answer: Answer, more: float) -> dict[str, Tensor]:
    """Return the ratio of error to limit: by tile, by row of a tile, by column of a tile, by element."""
    rows, columns = _membership(answer.rows), _membership(answer.columns)  # [row tiles, rows], [column tiles, columns]
    square = error.square()
    by_row = square @ columns.t()  # [rows, column tiles]
    by_column = rows @ square  # [row tiles, columns]
    heights, widths = rows.sum(1, keepdim=True), columns.sum(1)
    tile = (rows @ by_row / (heights * widths)).sqrt() / (TILE_ERROR + more)
    line = LINE_ERROR + more
    return {
        "tile": tile,
        "row": torch.where(widths >= _LEAST_LINE, (by_row / widths).sqrt() / line, 0.0),
        "column": torch.where(heights >= _LEAST_LINE, (by_column / heights).sqrt() / line, 0.0),
        "element": error / (ELEMENT_ERROR + 4 * more),
    }


def _membership(indices: Tensor) -> Tensor:
    """Return a float64 matrix [tiles, indices]: 1 where an index lies in a tile, else 0."""
    tiles = indices // TILE
    each: Tensor = torch.unique(tiles)
    return (each.unsqueeze(1) == tiles.unsqueeze(0)).double()


def _finding(
    name: str, out: Tensor, answer: Answer, excess: dict[str, Tensor], error: Tensor, bias: Tensor | None
) -> Finding:
    """Describe the tile with the largest error."""
    rows, columns = _membership(answer.rows).bool(), _membership(answer.columns).bool()
    worst = torch.stack(
        [
            excess["tile"],
            torch.stack([excess["row"][tile].amax(0) for tile in rows]),
            torch.stack([excess["column"][:, tile].amax(1) for tile in columns], 1),
            torch.stack([torch.stack([excess["element"][r][:, c].amax() for c in columns]) for r in rows]),
        ]
    ).cpu()
    bad = (worst > 1).any(0)
    i, j = divmod(int(worst.amax(0).argmax()), bad.shape[1])
    what = ("tile", "row", "column", "element")[int(worst[:, i, j].argmax())]
    inside = torch.where(rows[i].unsqueeze(1) & columns[j].unsqueeze(0), error, -1.0)
    r, c = divmod(int(inside.argmax()), inside.shape[1])
    row, column = int(answer.rows[r]), int(answer.columns[c])
    got = out[row, column].item()
    want = answer.product[r, c].item() + (0.0 if bias is None else bias[column].item())
    zero = not bool(out.index_select(0, answer.rows[rows[i]]).index_select(1, answer.columns[columns[j]]).any())
    at = f"element {row, column} is {got:.6g}, needs {want:.6g}"
    detail = "is all zero" if zero else f"is wrong, seen by {what}: {at}, off by {error[r, c].item():.0%} of its size"
    kind, tile = "zero" if zero else "wrong values", (row // TILE, column // TILE)
    count = int((~bad).sum())
    return Finding(name, kind, detail, tile, count, bad.numel(), (row, column), f"{got:.6g}", f"{want:.6g}")
