"""The GPU side of an HBM tier: device memory, stream events, and pinned host memory."""
