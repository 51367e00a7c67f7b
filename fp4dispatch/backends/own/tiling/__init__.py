"""Which build of a kernel, and which launch shape, serves a problem."""
