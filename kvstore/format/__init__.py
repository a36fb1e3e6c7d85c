"""The byte format of a block: header, keys, schema, layers. Pure: no I/O."""
