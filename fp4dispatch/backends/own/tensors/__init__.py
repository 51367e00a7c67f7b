"""Operands as our kernels read them: quantised activations, packed and folded weights."""
