"""The engine's pages: what they are in the pool's blocks, and what copies them."""
