"""What came of a simulation: figures, tables, goodput."""
