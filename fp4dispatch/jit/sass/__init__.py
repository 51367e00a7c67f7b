"""Static analysis of what machine code does before it waits for the previous grid.

``listing`` parses the output of ``nvdisasm -c``. ``parameters`` reads the layout of a kernel's arguments. ``opcodes``
holds the allow-list. ``values`` and ``transfer`` trace addresses back to the arguments. ``paths`` follows branches,
calls and returns. ``judge`` reports forbidden instructions before the barrier. docs/proof.md explains the proof.
"""
