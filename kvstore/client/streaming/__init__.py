"""Layer-wise streaming: read blocks layer by layer, also while a writer is still writing them."""
