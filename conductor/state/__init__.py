"""The scheduler's state: instances, the prefix index, the prefills in flight. Pure."""
