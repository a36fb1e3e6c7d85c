"""The Hugging Face connector: same tokens with and without the pool; the pool is really used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvsupport import damage  # noqa: E402
from llamasupport import (  # noqa: E402
    BLOCK,
    NEW,
    POOL,
    assert_same_cache,
    computed,
    greedy,
    make_model,
    plain,
    tokens,
)
from transformers import DynamicCache, GenerationConfig  # noqa: E402

from tiffin.kvstore import Client  # noqa: E402
from tiffin.kvstore.connectors.transformers import PrefixCache, identity, schema_of  # noqa: E402
from tiffin.kvstore.connectors.transformers import prefix_cache as connector  # noqa: E402
from tiffin.kvstore.connectors.transformers.cache_argument import with_cache  # noqa: E402
from tiffin.kvstore.errors import InvalidInput  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsupport import Daemon


@pytest.fixture
def cached(client: Client, model: Any) -> PrefixCache:
    return PrefixCache(client, model, block_tokens=BLOCK)


class Counting:
    """Counts the tokens that go through the model, which are those really computed."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        self._hook = model.model.embed_tokens.register_forward_pre_hook(self._count)

    def _count(self, _: Any, inputs: tuple[Any, ...]) -> None:
        self.tokens += inputs[0].shape[1]

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_greedy_tokens_are_the_same_with_the_pool(
    client: Client, dtype: str, kv_heads: int
) -> None:
    model = make_model(dtype=dtype, kv_heads=kv_heads)
    cached = PrefixCache(client, model, block_tokens=BLOCK)
    ids = tokens(5 * BLOCK + 17)
    expected = plain(model, ids)
    assert len(set(expected)) > 3  # a model that repeats itself would prove nothing
    assert greedy(cached.generate, ids) == expected
    assert (cached.last.hit_tokens, cached.last.stored_blocks) == (0, 5)
    with Counting(model) as counting:
        assert greedy(cached.generate, ids) == expected
    assert (cached.last.hit_tokens, cached.last.stored_blocks) == (5 * BLOCK, 0)
    assert counting.tokens == 17 + NEW - 1
    assert client.statistics()["counters"]["dram_hits"] == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loaded_bytes_are_the_computed_ones(client: Client, dtype: str) -> None:
    model = make_model(dtype=dtype)
    cached = PrefixCache(client, model, block_tokens=BLOCK)
    ids = tokens(3 * BLOCK + 1)
    expected = computed(model, ids)
    cached.save(expected, ids)
    loaded, hit = cached.load(ids)
    assert hit == 3 * BLOCK
    assert_same_cache(loaded, expected, hit)


def test_another_tail_uses_the_shared_prefix(cached: PrefixCache, model: Any) -> None:
    first = tokens(4 * BLOCK + 5)
    other = torch.cat([first[:, : 2 * BLOCK + 30], tokens(99, seed=7)], 1)
    greedy(cached.generate, first)
    assert greedy(cached.generate, other) == plain(model, other)
    assert cached.last.hit_tokens == 2 * BLOCK


def test_an_exact_multiple_leaves_a_token_to_compute(cached: PrefixCache, model: Any) -> None:
    ids = tokens(3 * BLOCK)
    greedy(cached.generate, ids)
    assert greedy(cached.generate, ids) == plain(model, ids)
    assert cached.last.hit_tokens == 2 * BLOCK


def test_a_prompt_shorter_than_a_block_is_neither_stored_nor_found(
    cached: PrefixCache, model: Any
) -> None:
    ids = tokens(BLOCK - NEW)
    for _ in range(2):
        assert greedy(cached.generate, ids) == plain(model, ids)
        assert (cached.last.hit_tokens, cached.last.stored_blocks) == (0, 0)


def test_generated_tokens_are_stored_too(cached: PrefixCache, model: Any) -> None:
    ids = tokens(2 * BLOCK - 5)
    answer = cached.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert cached.last.stored_blocks == 2
    turn = torch.cat([answer, tokens(20, seed=3)], 1)
    assert greedy(cached.generate, turn) == plain(model, turn)
    assert cached.last.hit_tokens == 2 * BLOCK


def test_the_last_generated_token_is_not_in_the_cache(cached: PrefixCache) -> None:
    ids = tokens(2 * BLOCK - NEW)  # input and output end with the block, the cache one before it
    cached.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert cached.last.stored_blocks == 1


def test_other_values_in_the_cache_give_other_tokens(cached: PrefixCache, model: Any) -> None:
    """The negative control: the model attends to the loaded values."""
    ids = tokens(4 * BLOCK + 3)
    greedy(cached.generate, ids)
    right, _ = cached.load(ids)
    wrong, _ = cached.load(ids)
    for layer in wrong.layers:
        layer.values.neg_()
    mask = torch.ones_like(ids)
    assert (
        greedy(model.generate, ids, **with_cache(model, right), attention_mask=mask)
        == plain(model, ids)
        != greedy(model.generate, ids, **with_cache(model, wrong), attention_mask=mask)
    )


def test_a_loaded_cache_is_the_callers_own(cached: PrefixCache, model: Any) -> None:
    ids = tokens(2 * BLOCK + 3)
    greedy(cached.generate, ids)
    mine, _ = cached.load(ids)
    for layer in mine.layers:
        layer.keys.zero_()
    assert greedy(cached.generate, ids) == plain(model, ids)
    assert cached.last.hit_tokens == 2 * BLOCK


def test_damage_in_the_pool_is_a_miss(cached: PrefixCache, client: Client, model: Any) -> None:
    ids = tokens(4 * BLOCK + 3)
    greedy(cached.generate, ids)
    prefix = cached.schema.prefix(ids)
    with client.get(prefix) as blocks:
        damage(blocks[2].memory, 1000)
    assert greedy(cached.generate, ids) == plain(model, ids)
    assert (cached.last.hit_tokens, cached.last.load_reason) == (2 * BLOCK, "corrupt")
    assert cached.failures == 0
    greedy(cached.generate, ids)
    assert cached.last.hit_tokens == 4 * BLOCK  # the good one took its place


# -- whose blocks ----------------------------------------------------------------------------------


def test_equal_configurations_with_other_weights_share_nothing(client: Client) -> None:
    ids = tokens(3 * BLOCK + 3)
    one, two = (make_model(seed=seed) for seed in (1, 2))
    greedy(PrefixCache(client, one, block_tokens=BLOCK).generate, ids)
    other = PrefixCache(client, two, block_tokens=BLOCK)
    assert greedy(other.generate, ids) == plain(two, ids)
    assert other.last.hit_tokens == 0


def test_equal_weights_share_whatever_the_path(client: Client) -> None:
    ids = tokens(3 * BLOCK + 3)
    one, two = make_model(), make_model(_name_or_path="somewhere/else")
    greedy(PrefixCache(client, one, block_tokens=BLOCK).generate, ids)
    other = PrefixCache(client, two, block_tokens=BLOCK)
    assert greedy(other.generate, ids) == plain(two, ids)
    assert other.last.hit_tokens == 3 * BLOCK


def test_namespaces_and_secrets_share_nothing(client: Client, model: Any) -> None:
    ids = tokens(2 * BLOCK + 3)
    greedy(PrefixCache(client, model, block_tokens=BLOCK, namespace="a").generate, ids)
    for namespace, secret in (("b", b""), ("a", b"s" * 16), ("", b"")):
        other = PrefixCache(client, model, block_tokens=BLOCK, namespace=namespace, secret=secret)
        assert other.load(ids)[1] == 0


def test_identity_sees_configuration_and_weights() -> None:
    first = identity(make_model())
    assert first == identity(make_model())
    assert first != identity(make_model(seed=5))
    assert first != identity(
        make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    )
    changed = make_model()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[-1, -1] += 1
    assert first != identity(changed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_schema_follows_the_configuration(dtype: str) -> None:
    schema = schema_of(make_model(dtype=dtype, head_dim=24), block_tokens=BLOCK)
    parts = schema.layers[0].parts
    assert [(part.heads, part.dim, part.dtype) for part in parts] == [(2, 24, dtype)] * 2
    assert len(schema.layers) == 3


def test_an_explicit_head_dim_works(client: Client) -> None:
    model = make_model(head_dim=24)
    cached = PrefixCache(client, model, block_tokens=BLOCK)
    ids = tokens(2 * BLOCK + 9)
    greedy(cached.generate, ids)
    assert greedy(cached.generate, ids) == plain(model, ids)
    assert cached.last.hit_tokens == 2 * BLOCK


# -- what is refused -------------------------------------------------------------------------------


def test_sliding_windows_are_refused_by_layer() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
    )
    with pytest.raises(InvalidInput, match=r"layer 2 .*SlidingWindow"):
        schema_of(Qwen2ForCausalLM(config).eval())


def test_keys_that_depend_on_the_length_are_refused() -> None:
    model = make_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(InvalidInput, match="dynamic"):
        schema_of(model)


def test_float64_is_refused() -> None:
    with pytest.raises(InvalidInput, match="float64"):
        schema_of(make_model(dtype="float64"))


def test_batches_and_padding_are_refused(cached: PrefixCache) -> None:
    with pytest.raises(InvalidInput, match="one prompt"):
        cached.generate(torch.cat([tokens(10), tokens(10)]))
    with pytest.raises(InvalidInput, match="one prompt"):
        cached.load(tokens(10)[0])
    mask = torch.ones(1, 10)
    mask[0, 0] = 0
    with pytest.raises(InvalidInput, match="all ones"):
        cached.generate(tokens(10), attention_mask=mask)


def test_a_prompt_is_passed_as_to_the_model(cached: PrefixCache, model: Any) -> None:
    ids = tokens(BLOCK + 3)
    expected = plain(model, ids)
    config = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    mask = torch.ones_like(ids)
    for answer in (
        cached.generate(inputs=ids, generation_config=config),
        cached.generate(ids, config),
        cached.generate(input_ids=ids, attention_mask=mask, generation_config=config),
        cached.generate(input_ids=ids, attention_mask=mask.bool(), generation_config=config),
    ):
        assert answer[0, ids.shape[1] :].tolist() == expected
    assert cached.last.hit_tokens == BLOCK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass the prompt once"),
        ({"inputs": tokens(10), "input_ids": tokens(10)}, "pass the prompt once"),
        ({"inputs": [[1, 2, 3]]}, "tensor of token ids"),
        ({"inputs": tokens(10).numpy()}, "tensor of token ids"),
        ({"inputs": "a prompt"}, "tensor of token ids"),
        ({"inputs": tokens(10), "attention_mask": [[1] * 10]}, r"a tensor \[1, 10\]"),
        ({"inputs": tokens(10), "attention_mask": torch.ones(1, 9)}, r"a tensor \[1, 10\]"),
        ({"inputs": tokens(10), "attention_mask": torch.zeros(1, 10)}, "pass the prompt alone"),
        ({"inputs": tokens(10), "generation_config": {"num_beams": 2}}, "GenerationConfig"),
        ({"inputs": tokens(10).float()}, "integers"),
    ],
)
def test_what_the_cache_cannot_serve_is_said(
    cached: PrefixCache, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        cached.generate(**arguments)


def test_load_and_save_refuse_what_is_no_prompt_and_no_cache(cached: PrefixCache) -> None:
    for ids in ([[1, 2, 3]], [1, 2, 3], None, "text"):
        with pytest.raises(InvalidInput, match="one prompt, a tensor"):
            cached.load(ids)
        with pytest.raises(InvalidInput, match="one prompt, a tensor"):
            cached.save(DynamicCache(config=cached.model.config), ids)
    for cache in (None, ((tokens(3), tokens(3)),)):
        with pytest.raises(InvalidInput, match="a cache is transformers' DynamicCache"):
            cached.save(cache, tokens(10))


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"inputs_embeds": None},
        {"pixel_values": None},
        {"position_ids": None},
        {"past_key_values": None},
        {"cache": None},
        {"generation_config": GenerationConfig(num_beams=3)},
    ],
)
def test_arguments_that_could_change_the_cache_are_refused(
    cached: PrefixCache, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput):
        cached.generate(tokens(10), **arguments)


def test_a_foreign_cache_and_training_mode_are_refused(cached: PrefixCache) -> None:
    ids = tokens(2 * BLOCK)
    other = make_model(kv_heads=4)
    theirs = DynamicCache(config=other.config)
    other(ids, **with_cache(other, theirs))
    with pytest.raises(InvalidInput, match="configuration says"):
        cached.save(theirs, ids)
    cached.model.train()
    try:
        with pytest.raises(InvalidInput, match="training"):
            cached.generate(ids, max_new_tokens=2)
    finally:
        cached.model.eval()


# -- a pool that fails -----------------------------------------------------------------------------


def test_a_node_that_dies_does_not_stop_generation(
    own_daemon: Callable[..., Daemon],
    model: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector, "RETRY_S", 0.0)
    daemon = own_daemon(dram=64 << 20, options=["--no-prefault"])
    with Client.open(daemon.url) as client:
        cached = PrefixCache(client, model, block_tokens=BLOCK)
        ids = tokens(3 * BLOCK + 3)
        greedy(cached.generate, ids)
        greedy(cached.generate, ids)
        assert cached.last.hit_tokens == 3 * BLOCK
        daemon.kill()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert greedy(cached.generate, ids) == plain(model, ids)
        assert cached.failures == 4  # two loads and two saves
        assert (cached.last.hit_tokens, cached.last.save_reason) == (0, "unavailable")
        assert len(caplog.records) == 1
        with Client.open(POOL) as another:
            cached.client = another
            greedy(cached.generate, ids)
            assert cached.last.stored_blocks == 3


def test_a_failed_pool_is_left_alone_for_a_while(
    cached: PrefixCache, client: Client, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "RETRY_S", 600.0)
    ids = tokens(2 * BLOCK + 3)
    client.close()
    assert greedy(cached.generate, ids) == plain(model, ids)
    assert cached.failures == 1  # the save did not even try


def test_a_cache_that_cannot_be_saved_is_no_fault_of_the_pool(
    cached: PrefixCache, model: Any
) -> None:
    """The caller gets the error, and the next call asks the pool."""
    ids = tokens(2 * BLOCK + 3)
    cache = DynamicCache(config=model.config)
    model(ids, **with_cache(model, cache))
    cache.layers[1].values = cache.layers[1].values[:, :, :BLOCK]
    with pytest.raises(InvalidInput, match="can't be saved"):
        cached.save(cache, ids)
    assert cached.failures == 0
    greedy(cached.generate, ids)
    assert (cached.last.stored_blocks, cached.last.save_reason) == (2, None)


def test_what_the_pool_refuses_is_refused_and_not_away(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A block that is larger than the pool's DRAM is refused at every save; generation goes on."""
    ids = tokens(2 * BLOCK + 3)
    with Client.open("embedded:?dram=4KiB&prefault=false") as small:
        cached = PrefixCache(small, model, block_tokens=BLOCK)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert greedy(cached.generate, ids) == plain(model, ids)
                assert cached.last.save_reason == "refused"
        assert ["refuses" in record.message for record in caplog.records] == [True]
        with Client.open(POOL) as large:
            cached.client = large
            greedy(cached.generate, ids)
            assert cached.last.stored_blocks == 2


@pytest.mark.parametrize("timeout_s", [-1, True, None, "1"])
def test_a_time_that_cannot_be(client: Client, model: Any, timeout_s: Any) -> None:
    with pytest.raises(InvalidInput, match="timeout_s"):
        PrefixCache(client, model, block_tokens=BLOCK, timeout_s=timeout_s)


@pytest.mark.usefixtures("patient")
def test_a_full_pool_stores_what_it_can(model: Any) -> None:
    schema = schema_of(model, block_tokens=BLOCK)
    with Client.open(f"embedded:?dram={3 * schema.extent_bytes}&prefault=false") as client:
        cached = PrefixCache(client, model, block_tokens=BLOCK, timeout_s=0.1)
        ids = tokens(5 * BLOCK + 3)
        assert greedy(cached.generate, ids) == plain(model, ids)
        assert cached.last.save_reason == "no_room"
        assert greedy(cached.generate, ids) == plain(model, ids)
        assert 0 < cached.last.hit_tokens < 5 * BLOCK
        assert cached.failures == 0


def test_saves_in_parts_store_everything(
    cached: PrefixCache, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "SAVE_BYTES_AT_ONCE", 2 * cached.schema.extent_bytes)
    ids = tokens(7 * BLOCK + 3)
    greedy(cached.generate, ids)
    assert cached.last.stored_blocks == 7
    assert greedy(cached.generate, ids) == plain(model, ids)
    assert cached.last.hit_tokens == 7 * BLOCK
