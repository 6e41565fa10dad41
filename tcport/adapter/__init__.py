"""The TritonIRAdapter: paged attention, however it is spelled, rewritten to the canonical operators."""
