"""The search for the fastest config: what `fagen tune` does."""
