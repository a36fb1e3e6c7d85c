"""The life of one request: placement, execution, answer stream, and reports to the conductor."""
