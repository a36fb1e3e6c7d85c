"""Sources of the prefix index: feeds from nodes and engines, and blocks predicted from routing."""
