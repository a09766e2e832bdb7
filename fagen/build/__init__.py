"""From a config to files: text, cubin, and what `fagen emit` writes."""
