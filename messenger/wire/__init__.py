"""Frames, ranges and tags as bytes, and where ranges lie in arrays. No I/O."""
