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

    Of an (N, K) that several runs have measured only the newest run counts: times of one size are compared with each
    other, and must be of one machine. What an older run has drawn of it is no problem of the whole, nor left.

    Raises
    ------
    ValueError
        If they are of different GPU models, or of none.
    """
    if len({doc["facts"]["device"] for doc in docs}) != 1:
        raise ValueError(f"runs are of {sorted({doc['facts']['device'] for doc in docs})}, needed one GPU model")
    if len(docs) == 1:
        return docs[0]
    parts: list[Document] = []  # newest first
    taken: set[Size] = set()
    for doc in sorted(docs, key=lambda doc: (doc["facts"]["date"], doc["seed"]), reverse=True):
        sizes = {_size(row) for row in doc["measured"]} - taken
        left = [each for each in doc["left"] if (each[0], each[1]) not in taken]
        taken |= sizes
        parts += [_only(doc, sizes) | {"left": left}] if sizes or left else []
    done = {(row["n"], row["k"], row["m"]) for doc in parts for row in doc["measured"]}
    left = [list(each) for each in dict.fromkeys(tuple(each) for doc in parts for each in doc["left"])]
    left = [each for each in left if tuple(each) not in done]
    in_order = sorted((doc for doc in parts if doc["measured"]), key=operator.itemgetter("seed")) or parts
    commits = dict.fromkeys(doc["facts"]["commit"] for doc in in_order)
    return parts[0] | {
        "subject": "several seeds",
        "facts": parts[0]["facts"] | {"commit": ", ".join(commits)},
        "seed": ", ".join(str(doc["seed"]) for doc in in_order),
        "stopped": "; ".join(dict.fromkeys(doc["stopped"] for doc in parts if doc["stopped"])),
        "problems": len(done) + len(left),
        "left": left,
        "seconds": sum(doc["seconds"] for doc in parts),
        **{key: [each for doc in parts for each in doc[key]] for key in ("tried", "measured", "launches")},
        **{
            key: {name: value for doc in reversed(parts) for name, value in doc[key].items()}
            for key in ("owners", "methods", "absent", "refused")
        },
    }


def _only(doc: Document, sizes: set[Size]) -> Document:
    """Return what a run found of some sizes."""
    rows = {key: [row for row in doc[key] if _size(row) in sizes] for key in ("measured", "launches")}
    return doc | rows | {"tried": [each for each in doc["tried"] if (each[0], each[1]) in sizes]}


def _size(row: Mapping[str, Any]) -> Size:
    return row["n"], row["k"]
