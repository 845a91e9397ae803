"""From lengths to optimizer steps and micro-batches of fixed shape: pure functions, no torch.

steps = deal_steps(lengths, effective_batch, seed, epoch)   # resume: steps[s:]
cuts = ladder(lengths, effective_batch, cap_tokens)         # cuts[0], then for less memory
for rank in cut_step(lengths, steps[0], cuts[0], ranks): ...
"""

from trainfit.packing.cut_ladder import Cut, PaddedCut, coarser_cuts, cut_step, ladder
from trainfit.packing.steps import MicroBatch, PackedCut, deal_steps

__all__ = [
    "Cut",
    "MicroBatch",
    "PackedCut",
    "PaddedCut",
    "coarser_cuts",
    "cut_step",
    "deal_steps",
    "ladder",
]
