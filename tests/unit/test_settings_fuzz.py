"""Any text in any variable: a typed value or a SettingsError, never another exception and never a silent default.

19 settings x 500 inputs each, plus 1000 environments: 10500 inputs a run.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fp4dispatch.errors import SettingsError
from fp4dispatch.settings import PREFIX, SETTINGS, settings

TYPES: dict[str, tuple[type, ...]] = {
    "disable": (tuple,),
    "jit": (bool,),
    "fp8_copy": (bool,),
    "nvtx": (bool,),
    "max_jobs": (int,),
    "cache_dir": (Path,),
    "nvcc": (Path,),
    "cuda_home": (Path,),
    "xdg_cache_home": (Path,),
    "cutlass_path": (Path,),
}
CHOICES = {
    "pdl": {"auto", "off"},
    "selfcheck": {"off", "auto", "force"},
    "log": {"debug", "info", "warning", "error", "off"},
}

# What an environment can hold: no NUL, and only what encodes to bytes (surrogate escapes do).
VALUES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
    st.binary(max_size=20).filter(lambda raw: b"\0" not in raw).map(os.fsdecode),
    st.integers().map(str),
    st.sampled_from(
        ["~", "~x", "~root", "~\x7f/", "on", "OFF", " auto ", ",", "a,,b", "0x10", "٣", "+1", "1_0", "-", ".."]
    ),
)


@pytest.mark.parametrize("key", sorted(SETTINGS))
@hypothesis_settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES)
@example(value="")
@example(value="~no-such-user/x")
def test_a_typed_value_or_a_settings_error(key: str, value: str) -> None:
    name = SETTINGS[key].name
    with mock.patch.dict(os.environ, {name: value}):
        try:
            parsed = getattr(settings, key)
        except SettingsError as error:
            assert name in str(error)  # noqa: PT017
            assert repr(value) in str(error)  # noqa: PT017
            return
    if key in CHOICES and value:
        assert parsed in CHOICES[key]
        assert parsed == value.strip().lower()
    elif value:
        assert isinstance(parsed, TYPES.get(key, (str,)))
    if key == "max_jobs" and value:
        assert 1 <= parsed <= 999999
        assert int(value.strip()) == parsed  # int() leaves separators such as \x1f, which strip() takes
    if key in ("jit", "fp8_copy", "nvtx") and value:
        assert value.strip().lower() in ({"1", "true", "on", "yes"} if parsed else {"0", "false", "off", "no"})


@hypothesis_settings(max_examples=1000, deadline=None)
@given(st.dictionaries(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0189", max_size=14).map(PREFIX.__add__), VALUES, max_size=4))
def test_unknown_names_are_all_reported(names: dict[str, str]) -> None:
    known = {setting.name for setting in SETTINGS.values()}
    with mock.patch.dict(os.environ, names):
        sentences = settings.unknown()
    assert [sentence.split(" ", 1)[0] for sentence in sentences] == sorted(set(names) - known)
