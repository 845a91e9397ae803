"""Attention on rows of tokens, padded or packed, behind transformers' attention interface.

`attention` says which token belongs to which sequence, chooses how attention is computed, and has
the masked reference that runs everywhere; `varlen` is the fast path of packed rows on GPUs.
"""
