"""Unit tests start without a build: what other tests have built and proved on this machine changes decisions."""

import pytest

from fp4dispatch.jit import proven


@pytest.fixture(scope="package", autouse=True)  # not longer: tests that compile may come next, and then these again
def nothing_is_built(tmp_path_factory):
    """Point the cache at an empty folder, for this process and for those that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path_factory.mktemp("nothing-built")))
        proven.forget()
        yield
    proven.forget()
