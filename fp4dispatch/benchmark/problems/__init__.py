"""The problems of a benchmark: shapes of real models, and the operands of one."""
