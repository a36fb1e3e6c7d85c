"""Data files that ship with the package; README.md says where each is from."""
