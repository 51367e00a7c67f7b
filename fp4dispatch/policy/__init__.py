"""Which backend is safe, and which is preferred: rules and capabilities as data, resolved without any backend."""
