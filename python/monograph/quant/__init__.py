"""Packed weights: `PackedWeight`, `QuantizedTensor`, and how producers write them (`quant_methods/`)."""
