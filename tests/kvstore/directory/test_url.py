"""Which URL opens which directory, and that no message repeats a password."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.directory import EmbeddedDirectory, host_id, open_directory
from tiffin.kvstore.directory.testing import record
from tiffin.kvstore.directory.url import PARAMETERS, PASSWORD_VARIABLE, RedisOptions, parse_redis
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "s3cret"


def parse(url: str, **environ: str) -> RedisOptions:
    return parse_redis(url, environ)


def test_one_server() -> None:
    options = parse("redis://db.example:7000/3")
    assert (options.kind, options.hosts, options.database) == ("single", (("db.example", 7000),), 3)
    assert not options.tls
    assert options.password is options.username is None
    assert parse("redis://db.example").hosts == (("db.example", 6379),)
    assert parse("redis://[::1]:7000").hosts == (("::1", 7000),)
    assert parse("redis://db.example?timeout=1.5").timeout_s == 1.5


def test_other_schemes() -> None:
    assert parse("valkey://h") == parse("redis://h")
    assert parse("rediss://h").tls
    assert parse("valkeys://h").tls
    assert parse("rediss+cluster://h").tls


def test_a_cluster_and_sentinels_have_several_hosts() -> None:
    cluster = parse("redis+cluster://a:1,b:2,c")
    assert (cluster.kind, cluster.hosts) == ("cluster", (("a", 1), ("b", 2), ("c", 6379)))
    sentinel = parse("redis+sentinel://a,b:2/mymaster")
    assert (sentinel.kind, sentinel.hosts) == ("sentinel", (("a", 26379), ("b", 2)))
    assert sentinel.service == "mymaster"


def test_passwords_come_from_the_url_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("from-file\n")
    file.chmod(0o600)
    in_url = parse("redis://user:from%2Furl@h", **{PASSWORD_VARIABLE: "from-env"})
    assert (in_url.username, in_url.password) == ("user", "from/url")
    in_file = parse(f"redis://h?password_file={file}", **{PASSWORD_VARIABLE: "from-env"})
    assert in_file.password == "from-file"
    assert parse("redis://h", **{PASSWORD_VARIABLE: "from-env"}).password == "from-env"
    for_sentinels = parse(f"redis+sentinel://:{SECRET}@h/m?sentinel_password_file={file}")
    assert for_sentinels.password == SECRET
    assert for_sentinels.of_sentinels().password == "from-file"
    assert for_sentinels.of_sentinels().username is None


def test_a_password_file_is_private(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    file.chmod(0o640)
    with pytest.raises(InvalidInput, match="chmod 600"):
        parse(f"redis://h?password_file={file}")
    with pytest.raises(InvalidInput, match="No such file"):
        parse(f"redis://h?password_file={file}.not")
    file.chmod(0o600)
    for content in (b"", b"\n", b"\xff\xfe", b"x" * 5000):
        file.write_bytes(content)
        with pytest.raises(InvalidInput, match="password"):
            parse(f"redis://h?password_file={file}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "begins with"),
        ("redis", "no host:port"),
        ("http://h", "begins with"),
        ("redis://", "no host:port"),
        ("redis://h:x", "no host:port"),
        ("redis://h:0", "no host:port"),
        ("redis://h:70000", "no host:port"),
        ("redis://a,b", "redis[+]cluster"),
        ("redis://h/x", "database is a number"),
        ("redis://h/-1", "database is a number"),
        ("redis://h/0#x", "%23"),
        ("redis://h?tiemout=1", "known: password_file"),
        ("redis://h?timeout=1&timeout=2", "twice"),
        ("redis://h?timeout=soon", "seconds"),
        ("redis://h?timeout=0", "seconds"),
        ("redis://h?timeout=nan", "seconds"),
        ("redis://h?ca=/etc/ca.pem", "write rediss"),
        ("rediss://h?cert=/etc/cert.pem", "go together"),
        ("rediss://h?ca=/no/such/file", "can't read ca"),
        ("redis+sentinel://h", "mymaster"),
        ("redis+cluster://" + ",".join(["h"] * 65), "65 hosts"),
        ("redis://[::1", "redis://"),
        ("redis://:p@h?password_file=/f", "choose one"),
    ],
)
def test_urls_that_can_not_work(url: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(url)


@pytest.mark.parametrize(
    "rest", ["h:x", "h/0#x", "h?a=1", "h,i", "h/x", "[::1", "h?timeout=x", "h:99999"]
)
def test_no_message_repeats_a_password(rest: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse(f"redis://user:{SECRET}@{rest}")
    assert SECRET not in str(raised.value)


def test_no_repr_shows_a_password() -> None:
    options = parse(f"redis://user:{SECRET}@h")
    assert SECRET not in repr(options)
    assert SECRET not in options.address


def test_every_parameter_is_known_to_its_message() -> None:
    with pytest.raises(InvalidInput) as raised:
        parse("redis://h?x=1")
    assert all(name in str(raised.value) for name in PARAMETERS)


def test_embedded_directories_are_shared_by_name() -> None:
    one, same = open_directory("embedded:"), open_directory("embedded:")
    other, named = open_directory("embedded:", pool="b"), open_directory("embedded:x")
    number = one.register(record())
    assert same.nodes().keys() == {number}
    assert other.nodes() == named.nodes() == {}
    one.close()
    assert same.nodes().keys() == {number}
    same.close()
    again = open_directory("embedded:")
    assert again.nodes() == {}, "forgotten with its last handle"
    for directory in (other, named, again):
        directory.close()


def test_two_directories_without_a_name_are_two() -> None:
    one, other = EmbeddedDirectory(), EmbeddedDirectory()
    one.register(record())
    assert other.nodes() == {}
    one.close()
    other.close()


@pytest.mark.parametrize("pool", ["", "a b", "a{b}", "x" * 65, "p:q", "ä", "a\n"])
def test_pool_names_are_plain_words(pool: str) -> None:
    for url in ("embedded:", "redis://h"):
        with pytest.raises(InvalidInput, match="pool"):
            open_directory(url, pool=pool)


def test_the_host_is_the_same_for_everyone_on_it() -> None:
    assert host_id() == host_id()
    assert len(host_id()) == 32
    int(host_id(), 16)
