"""The client of a pool of many nodes: where it reads blocks from, and where it puts them."""
