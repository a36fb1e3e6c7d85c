"""The clients' verbs as generators without I/O, their argument checks, and their drivers."""
