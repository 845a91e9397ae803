"""From lengths to optimizer steps and micro-batches of fixed shape: pure functions, no torch.

steps = deal_steps(lengths, effective_batch, seed, epoch)   # resume: steps[s:]
cuts = ladder(lengths, effective_batch, cap_tokens)         # cuts[0], then for less memory
for rank in cut_step(lengths, steps[0], cuts[0], ranks): ...
"""

from trainfit.packing.cut_ladder import Cut, coarser_cuts, cut_step, ladder
from trainfit.packing.packed import Fill, MicroBatch, PackedCut, fit_budget, measure_fill
from trainfit.packing.padded import PaddedCut, fit_padded
from trainfit.packing.steps import deal_steps, share_step

__all__ = [
    "Cut",
    "Fill",
    "MicroBatch",
    "PackedCut",
    "PaddedCut",
    "coarser_cuts",
    "cut_step",
    "deal_steps",
    "fit_budget",
    "fit_padded",
    "ladder",
    "measure_fill",
    "share_step",
]
