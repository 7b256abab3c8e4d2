"""Names of functions that stand in for those of PyTorch."""
