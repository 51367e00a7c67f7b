"""Facts about this machine: GPUs, driver, libraries, capture state. The only prober of the machine."""
