"""The cache, the settings, the plug-ins and the stored verdicts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable

from fp4dispatch.cli.checks.facts import Check, Facts, Status
from fp4dispatch.cli.checks.setting_values import wrong_values
from fp4dispatch.jit.store import guard
from fp4dispatch.jit.store.cache import BUILDING, KERNELS, LOCKS, LOGS
from fp4dispatch.jit.store.records import FOLDERS
from fp4dispatch.policy.catalogue import catalogue

_STORES = (KERNELS, BUILDING, LOCKS, LOGS, *FOLDERS)
_SMALL = 1 << 20


def check_cache(facts: Facts) -> Iterable[Check]:
    """Whether the cache folder can be used."""
    folder = facts.cache_dir
    if folder == guard.made():
        text = "no home folder is known for this user: each process builds its kernels anew"
        yield Check("cache", "warn", text, "set FP4DISPATCH_CACHE_DIR to a folder that you can write")
        return
    if faults := guard.faults(folder, _STORES):
        text, _, fix = faults[0].partition("\n  fix: ")
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        yield Check("cache", "fail", f"{text}{more}: it is not used, and work is done anew in each process", fix)
        return
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if shutil.disk_usage(place).free < _SMALL:
        text = f"no space is left at {place}: finished kernels load, others are built for each process anew"
        yield Check("cache", "warn", text, "fp4dispatch cache prune --max-size 1GB, or free some space")
    elif not os.access(place, os.W_OK | os.X_OK):
        text = f"{place} is read-only: finished kernels load, others are built for each process anew"
        yield Check("cache", "warn", text, "set FP4DISPATCH_CACHE_DIR to a folder that you can write")
    else:
        yield Check("cache", "ok", f"{folder}" + ("" if place == folder else " (made when needed)"))


def check_settings(facts: Facts) -> Iterable[Check]:
    """Whether every setting is understood."""
    found = [*facts.settings_errors, *wrong_values(facts.values, facts.child.plugins)]
    for error in found:
        status: Status = "warn" if "is not a setting" in error else "fail"
        yield Check("settings", status, error, "correct the variable, or unset it")
    if not found:
        yield Check("settings", "ok", "all understood")
    arch = facts.system.arch
    if arch and any(c.backend == "w4a8_expanded" and arch.sm in c.archs for c in catalogue().capabilities):
        what = "FP8 copy of NVFP4 weights, 8 bits each, for many tokens"
        if facts.fp8_copy:
            yield Check("settings", "ok", f"{what}: allowed, w4a8_expanded may be chosen")
        else:
            fix = "FP4DISPATCH_FP8_COPY=1 allows it, where the memory is there"
            yield Check("settings", "ok", f"{what}: not allowed, w4a8_expanded runs only where it is named", fix)


def check_plugins(facts: Facts) -> Iterable[Check]:
    """Whether every plug-in can be imported."""
    if facts.child.error is not None:
        yield Check("plug-ins", "skip", "not tried: they need torch")
    elif facts.child.plugins_error:
        yield Check("plug-ins", "fail", facts.child.plugins_error, "uninstall the one that does so")
    elif not facts.child.plugins:
        yield Check("plug-ins", "skip", "none installed")
    for name, error in facts.child.plugins.items():
        if error:
            yield Check("plug-ins", "fail", f"{name} cannot be imported: {error}", f"update or uninstall {name}")
        else:
            yield Check("plug-ins", "ok", name)


def check_selfcheck(facts: Facts) -> Iterable[Check]:
    """Which verdicts of the self-check hold here."""
    if facts.child.error is not None:
        yield Check("self-check", "skip", "verdicts not read: they need torch")
    elif facts.child.plugins_error:
        yield Check("self-check", "skip", "verdicts not read: they need the plug-ins")
    elif facts.child.verdicts_error:
        text = f"its verdicts cannot be read: {facts.child.verdicts_error}"
        yield Check("self-check", "fail", text, f"remove {facts.selfcheck_folder}: backends are then checked again")
    elif not facts.child.verdicts:
        yield Check("self-check", "skip", "no verdict yet: a backend is checked when `auto` first chooses it")
    for kept in facts.child.verdicts:
        if kept.status != "failed":
            yield Check("self-check", "ok", kept.text)
        elif facts.selfcheck_off:
            text = f"{kept.text} Yet FP4DISPATCH_SELFCHECK=off lets it run"
            yield Check("self-check", "warn", text, "unset FP4DISPATCH_SELFCHECK")
        else:
            more = "".join(f" Also: {finding}." for finding in kept.findings[1:])
            fix = (
                f"other backends run instead. Report it with this text; {kept.backend} is checked again after an "
                f"update of the driver or a library, or once {facts.selfcheck_folder} is removed"
            )
            yield Check("self-check", "fail", f"{kept.text}{more}", fix)
