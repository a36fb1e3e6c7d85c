"""Where a prompt is prefilled: policies behind one interface, chosen by name."""
