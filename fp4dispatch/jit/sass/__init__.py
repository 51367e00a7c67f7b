"""What machine code does before it waits for the previous grid: listing -> paths -> values -> judgement.

``listing`` reads the text of ``nvdisasm -c``, ``parameters`` the layout of a kernel's arguments, ``opcodes`` the
allow-list, ``values`` and ``transfer`` follow addresses back to the arguments, ``paths`` follows branches, calls and
returns, and ``judge`` says what may not stand before the barrier. docs/proof.md explains the proof.
"""
