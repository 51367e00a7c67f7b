"""Scripts that measure and judge; no part of the package. In the repository: ``python -m bench.NAME --help``."""
