"""Token slices: MLPs of decoder layers computed a slice of tokens at a time, with the same bits.

slice_mlps(model)          # before TrainStep; `tiled_mlp: true` in a recipe
"""

from monograph.training.token_slices.sliced_mlp import check_sliced, slice_mlps, sliced_mlps, whole_mlps

__all__ = ["check_sliced", "slice_mlps", "sliced_mlps", "whole_mlps"]
