"""Other systems beside ours: Mooncake, LMCache, Dynamo and SGLang's router, each measured in turns
with ours in one run. `docs/peers.md` has the table and says what can't be compared."""
