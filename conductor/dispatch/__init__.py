"""Which requests an engine gets, and which the conductor holds back. Pure."""
