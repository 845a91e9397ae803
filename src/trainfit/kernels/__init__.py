"""Attention on rows of tokens, padded or packed, behind transformers' attention interface.

`layout` says which token belongs to which sequence, `attention` chooses how it is computed,
`masked` is the reference that runs everywhere.
"""
