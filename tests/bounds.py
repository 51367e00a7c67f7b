"""Up to how many tokens the policy has which backend for the small layers of GPU tests, on an H200.

GPU tests expect these; ``tests/unit/test_policy_anchors.py`` asks the policy for them where there is no GPU, so that a
rule that changes one is not found out on a GPU, months later.
"""

W8A16 = 8
"""FP8 weights by row or tensor: w8a16, then w8a8."""
W4A16 = 8
"""NVFP4 weights: w4a16, then w4a8 or an FP8 copy."""
