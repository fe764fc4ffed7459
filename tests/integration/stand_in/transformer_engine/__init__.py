"""Stands in for TransformerEngine where there is no GPU: its attention's arguments, computed on a CPU."""
