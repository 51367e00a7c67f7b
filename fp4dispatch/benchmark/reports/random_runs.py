"""Several runs of the random suite on one GPU model as one document: more problems than the time of a run allows."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp4dispatch.benchmark.reports.standing import Document

Size = tuple[int, int]
"""N, K."""


def by_model(docs: Iterable[Document]) -> list[Document]:
    """Return a document for each GPU model, in the order in which models come first."""
    found: dict[str, list[Document]] = {}
    for doc in docs:
        found.setdefault(doc["facts"]["device"], []).append(doc)
    return [together(some) for some in found.values()]


def together(docs: Sequence[Document]) -> Document:
    """Return runs on one GPU model as one; a single run as it is.

    Of an (N, K) that several runs have drawn only the newest run counts: times of one size are compared with each
    other, and must be of one machine.

    Raises
    ------
    ValueError
        If they are of different GPU models, or of none.
    """
    if len({doc["facts"]["device"] for doc in docs}) != 1:
        raise ValueError(f"runs are of {sorted({doc['facts']['device'] for doc in docs})}, needed one GPU model")
    if len(docs) == 1:
        return docs[0]
    newest_first = sorted(docs, key=lambda doc: (doc["facts"]["date"], doc["seed"]), reverse=True)
    owners: dict[Size, int] = {}
    for i, doc in enumerate(newest_first):
        for row in doc["measured"]:
            owners.setdefault(_size(row), i)

    def rows(kind: str) -> list[Mapping[str, Any]]:
        return [row for i, doc in enumerate(newest_first) for row in doc[kind] if owners.get(_size(row)) == i]

    def tried() -> list[Any]:
        return [each for i, doc in enumerate(newest_first) for each in doc["tried"] if owners.get((*each[:2],)) == i]

    last = newest_first[0]
    used = [doc for i, doc in enumerate(newest_first) if i in owners.values()]
    in_order = sorted(used, key=operator.itemgetter("seed"))
    commits = dict.fromkeys(doc["facts"]["commit"] for doc in in_order)
    return last | {
        "subject": "several seeds",
        "facts": last["facts"] | {"commit": ", ".join(commits)},
        "seed": ", ".join(str(doc["seed"]) for doc in in_order),
        "problems": sum(doc["problems"] for doc in used),
        "owners": {size: owner for doc in used for size, owner in doc["owners"].items()},
        "methods": {name: about for doc in reversed(used) for name, about in doc["methods"].items()},
        "absent": {name: why for doc in used for name, why in doc["absent"].items()},
        "left": [problem for doc in used for problem in doc["left"]],
        "stopped": "; ".join(dict.fromkeys(doc["stopped"] for doc in used if doc["stopped"])),
        "seconds": sum(doc["seconds"] for doc in used),
        "tried": tried(),
        "refused": {name: why for doc in used for name, why in doc["refused"].items()},
        "measured": rows("measured"),
        "launches": rows("launches"),
    }


def _size(row: Mapping[str, Any]) -> Size:
    return row["n"], row["k"]
