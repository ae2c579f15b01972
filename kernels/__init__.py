"""Pure functions on tensors: attention with log-sum-exp, merging of partial results, chunk scoring.

Nothing here keeps state or imports another part of triforce. A faster implementation of one of these functions
stands behind the same name and is tested against the plain one.
"""
