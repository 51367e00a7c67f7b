"""Compile-target records, one TOML file per target; read by :mod:`fp4dispatch.jit.catalog.flags`."""
