"""Attention on rows of tokens, padded or packed, behind transformers' attention interface.

`layout` says which token belongs to which sequence, `attention` chooses how it is computed and has
the masked reference that runs everywhere, `varlen` is the fast path of packed rows on GPUs.
"""
