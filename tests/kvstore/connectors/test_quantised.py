"""Caches in one byte per number: half the bytes, close numbers, never mixed with other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from llamasupport import BLOCK, POOL, computed, greedy, make_model, plain, tokens  # noqa: E402

from tiffin.kvstore import Client  # noqa: E402
from tiffin.kvstore.connectors.transformers import PrefixCache, schema_of  # noqa: E402
from tiffin.kvstore.connectors.transformers.cache_argument import with_cache  # noqa: E402
from tiffin.kvstore.errors import InvalidInput, SchemaError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = {"float8_e4m3": 448.0, "int8": 127.0}
FORMATS = list(LIMITS)
# Root mean square of the error of the logits, relative to that of the logits, for a model whose
# weights are drawn with deviation 0.1: twice what was measured over twelve prompts (docs).
LOGITS_BOUND = {"float8_e4m3": 0.07, "int8": 0.016}
MILD = {"initializer_range": 0.1}


@pytest.fixture
def client() -> Iterator[Client]:
    with Client.open(POOL) as client:
        yield client


def bound(numbers: Any, form: str, scale_tokens: int) -> Any:
    """How far a restored number may be off (docs/quantisation.md), [1, heads, n, dim]; with half a
    last place of the dtype to which it is rounded."""
    exact = numbers.double().abs()
    largest = exact.unflatten(2, (-1, scale_tokens)).amax(dim=(3, 4))
    scales = (largest / LIMITS[form]).repeat_interleave(scale_tokens, dim=2)[..., None]
    if form == "int8":
        allowed = scales * (0.5 + 2.0**-16)
    else:
        allowed = torch.maximum(exact / 16, scales / 1024) * (1 + 2.0**-18)
    return allowed + (exact + allowed) * torch.finfo(numbers.dtype).eps / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scale_tokens", [None, 16, 1])
@pytest.mark.parametrize("form", FORMATS)
def test_every_number_is_within_the_bound(
    client: Client, form: str, scale_tokens: int | None, dtype: str
) -> None:
    model = make_model(dtype=dtype)
    cached = PrefixCache(
        client, model, block_tokens=BLOCK, quantise=form, scale_tokens=scale_tokens
    )
    ids = tokens(3 * BLOCK + 1)
    expected = computed(model, ids)
    assert cached.save(expected, ids).stored == (0, 1, 2)
    loaded, hit = cached.load(ids)
    assert hit == 3 * BLOCK
    exact = True
    for mine, theirs in zip(loaded.layers, expected.layers, strict=True):
        for got, was in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            was = was[:, :, :hit]
            assert got.dtype == was.dtype
            allowed = bound(was, form, scale_tokens or BLOCK)
            assert ((got.double() - was.double()).abs() <= allowed).all()
            exact = exact and torch.equal(got, was)
    assert not exact  # it was quantised


@pytest.mark.parametrize("form", FORMATS)
def test_half_the_bytes_in_the_pool(form: str) -> None:
    model = make_model(dtype="bfloat16", head_dim=64)
    ids = tokens(4 * BLOCK)
    cache = computed(model, ids)
    used = {}
    for quantise in (None, form):
        with Client.open(POOL) as client:
            cached = PrefixCache(client, model, block_tokens=BLOCK, quantise=quantise)
            cached.save(cache, ids)
            (tier,) = client.statistics()["tiers"].values()
            used[quantise] = tier["committed_bytes"]
            assert used[quantise] == 4 * cached.schema.extent_bytes
    schema = schema_of(model, block_tokens=BLOCK, quantise=form)
    whole = schema_of(model, block_tokens=BLOCK)
    scales_bytes = 3 * 2 * 2 * 4  # layers, K and V, heads, float32
    assert schema.block_bytes == whole.block_bytes // 2 + scales_bytes
    # each extent has a header of a page, and ends with its last page
    assert used[form] <= used[None] // 2 + 4 * 2 * 4096


@pytest.mark.parametrize("form", FORMATS)
def test_logits_are_close(client: Client, form: str) -> None:
    model = make_model(**MILD)
    cached = PrefixCache(client, model, block_tokens=BLOCK, quantise=form)
    for seed in range(1, 5):
        ids = tokens(4 * BLOCK + 17, seed=seed)
        cached.save(computed(model, ids), ids)
        cache, hit = cached.load(ids)
        with torch.no_grad():
            exact = model(ids).logits[:, hit:]
            near = model(ids[:, hit:], **with_cache(model, cache)).logits
        error = (near - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
        assert 0 < error < LOGITS_BOUND[form]


def test_greedy_tokens_of_int8_are_the_same(client: Client) -> None:
    model = make_model(**MILD)
    cached = PrefixCache(client, model, block_tokens=BLOCK, quantise="int8")
    for seed in range(1, 5):
        ids = tokens(4 * BLOCK + 17, seed=seed)
        expected = plain(model, ids)
        assert len(set(expected)) > 3
        assert greedy(cached.generate, ids) == expected
        assert greedy(cached.generate, ids) == expected
        assert cached.last.hit_tokens == 4 * BLOCK


def test_formats_never_mix(client: Client) -> None:
    model = make_model()
    ids = tokens(2 * BLOCK + 1)
    choices: list[dict[str, Any]] = [
        {},
        {"checksum": "xxh3_64_pages"},
        *({"quantise": form} for form in FORMATS),
        *({"quantise": form, "scale_tokens": 16} for form in FORMATS),
    ]
    caches = [PrefixCache(client, model, block_tokens=BLOCK, **choice) for choice in choices]
    assert len({cached.schema.fingerprint for cached in caches}) == len(caches)
    expected = computed(model, ids)
    for index, cached in enumerate(caches):
        assert [other.load(ids)[1] for other in caches[index:]] == [0] * (len(caches) - index)
        cached.save(expected, ids)
    assert [cached.load(ids)[1] for cached in caches] == [2 * BLOCK] * len(caches)


def test_a_whole_block_shares_a_scale_by_default() -> None:
    model = make_model()
    default = schema_of(model, block_tokens=BLOCK, quantise="int8")
    assert default == schema_of(model, block_tokens=BLOCK, quantise="int8", scale_tokens=BLOCK)
    assert default.layers[0].parts[0].scale_tokens == BLOCK


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"quantise": "float8_e5m2"}, InvalidInput, "float8_e4m3 or int8"),
        ({"quantise": "int4"}, InvalidInput, "float8_e4m3 or int8"),
        ({"scale_tokens": 16}, InvalidInput, "goes with quantise"),
        ({"quantise": "int8", "scale_tokens": 0}, InvalidInput, "without scales"),
        ({"quantise": "int8", "scale_tokens": 48}, SchemaError, "does not divide"),
        ({"quantise": "int8", "scale_tokens": -1}, SchemaError, "scale_tokens"),
    ],
)
def test_what_cannot_be_quantised(
    client: Client, options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        PrefixCache(client, make_model(), block_tokens=BLOCK, **options)
