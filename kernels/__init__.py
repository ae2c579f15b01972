"""Pure functions on tensors: attention with log-sum-exp, merging of partial results, chunk scoring.

Nothing here imports another part of triforce. Faster implementations of a function are called behind the same name and
tested against the plain one; which one is used follows from the device and the call, or from `selection.use_kernels`.
"""
