"""The backends: one file and one class each, behind the contract of :mod:`fp4dispatch.backends.base`."""
