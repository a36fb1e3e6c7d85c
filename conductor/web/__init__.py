"""Parts that all web services of the conductor need: authorisation, connection limits, metrics."""
