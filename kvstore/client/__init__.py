"""The clients of one node: synchronous, and for asyncio."""
