"""What reproductions are run on: traces, systems, contests."""
