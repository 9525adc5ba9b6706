"""The configuration tree: defaults, file, overrides, and what is refused with the reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvass.common import config
from kvass.common.errors import Invalid


def test_defaults_are_valid_and_fixed() -> None:
    defaults = config.load()
    assert defaults == config.Config()
    assert defaults.cluster.kv_dtype == "fp8"
    with pytest.raises(dataclasses.FrozenInstanceError):
        defaults.host = "0.0.0.0"  # type: ignore[misc]


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvass.toml"
    file.write_text('[cluster]\nkv_dtype = "int8"\nblock_tokens = 32\n[store]\nhold_s = 5\n')
    loaded = config.load(file, ["cluster.block_tokens=8", 'cluster.name="a.b=c"', "store.hold_s=7"])
    assert (loaded.cluster.kv_dtype, loaded.cluster.block_tokens) == ("int8", 8)
    assert (loaded.cluster.name, loaded.store.hold_s) == ("a.b=c", 7.0)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("cluster.kv_dtype=bf16", "bf16"),  # a bare word is a string
        ('cluster.kv_dtype="bf16"', "bf16"),
        (" cluster.kv_dtype = bf16", None),
    ],
)
def test_bare_words(override: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(Invalid):
            config.load(None, [override])
    else:
        assert config.load(None, [override]).cluster.kv_dtype == read


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("nothing", "expected section.name=value"),
        ("cluster.unknown=1", "no setting cluster.unknown; cluster has name, model, .*, broker"),
        ("weights=int8", r"no setting weights \(did you mean cluster.weights\?\)"),
        ("cluster.wieghts=int8", r"no setting cluster.wieghts \(did you mean cluster.weights\?\)"),
        ("store.tenant_quotas=1", r"it has a value for each name: store.tenant_quotas.NAME=VALUE"),
        ("unknown.a=1", "no setting unknown; the top level has cluster, .*, host"),
        ("transport.transfer_timeout_s=1", "no setting transport.transfer_timeout_s"),
        ("decode.threads=-3", "decode.threads is -3; expected 0 to"),
        ("prefill.threads=100000", "prefill.threads is 100000; expected 0 to"),
        ("gateway.stage_s=-1", "gateway.stage_s is -1.* expected 0 to"),
        ("gateway.port=70000", "gateway.port is 70000; expected 0 to 65535"),
        ("store.slab_bytes=0", "store.slab_bytes is 0; expected at least 1048576"),
        ("store.slab_bytes=1", "store.slab_bytes is 1; expected at least 1048576: it must hold bl"),
        ("store.flash_bytes=0", "store.flash_bytes is 0; expected at least 1"),
        ("store.slab_bytes=8 furlongs", "store.slab_bytes is '8 furlongs'; expected bytes"),
        ("store.eviction=lfu", "store.eviction is 'lfu'; expected 'reuse' or 'lru'"),
        ("store.hold_s=60s", "store.hold_s is '60s'; expected a number, without a unit"),
        ("cluster=1", "cluster"),
        ("host.a=1", "host"),
        ("cluster.weights=int3", "cluster.weights.*'int8'"),
        ("cluster.kv_dtype=fp4", "cluster.kv_dtype.*'fp8'"),
        ("cluster.block_tokens=0", "block_tokens is 0; expected 1 to 256"),
        ("cluster.block_tokens=many", "cluster.block_tokens"),
        ("decode.chunk_tokens=8", r"decode.chunk_tokens is 8, less than .*\(16\)"),
        ("prefill.pool_share=1.5", "prefill.pool_share is 1.5"),
        ("prefill.batch_requests=0", "prefill: batch_requests"),
        ("store.hold_share=1", "store.hold_share is 1"),
        ("store.quarantine_share=0", "store.quarantine_share is 0"),
        ("store.replicas=-1", "store.replicas is -1; expected 1 to 16"),
        ("store.replicas=0", "store.replicas is 0; expected 1 to 16"),
        ("store.claim_s=-1", "store.claim_s is -1"),
        ("store.hold_s=nan", "store.hold_s is nan"),
        ("store.scrub_s=inf", "store.scrub_s is inf"),
        ("store.flash_unsynced_bytes=-1", "store.flash_unsynced_bytes is -1"),
        ("store.bucket_bytes=0", "store.bucket_bytes is 0"),
        ("store.bucket=kv", "store.bucket is 'kv'; expected s3://bucket or s3://bucket/prefix"),
        ("store.bucket=s3://", "store.bucket is 's3://'"),
        ("store.bucket=s3://Key:secret@host/kv", "store.bucket is"),
        ("store.bucket=s3://kv/../other", "store.bucket is"),
        ("store.bucket=s3://kv//other", "store.bucket is"),
        ("store.bucket=https://kv/other", "store.bucket is"),
        ("store.bucket=s3://kv/" + 300 * "a", "300 characters at most"),
    ],
)
def test_what_is_wrong_is_named(override: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        config.load(None, [override])


@pytest.mark.parametrize("ignored", ["cluster.broker='127.0.0.1:1883'", "store.replicas=2"])
def test_a_node_by_itself_ignores_nothing(ignored: str) -> None:
    name, _, value = ignored.partition("=")
    with pytest.raises(Invalid, match=f"standalone is set, and {name} is {value}.*leave out one"):
        config.load(None, ["store.standalone=true", ignored])


@pytest.mark.parametrize("address", ["s3://kv1", "s3://kv1/", "s3://my.kv-1/a/b_c.d-e"])
def test_buckets(address: str) -> None:
    assert config.load(None, [f"store.bucket={address}"]).store.bucket == address


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("'1.5KiB'", 1536), ("2kB", 2000), ("77", 77)],
)
def test_sizes_may_have_units(text: str, size: int) -> None:
    assert config.load(None, [f"gateway.body_bytes_max={text}"]).gateway.body_bytes_max == size


@pytest.mark.parametrize("text", ["[cluster", "[cluster]\nnmae = 1\n", "\x00"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvass.toml"
    file.write_text(text)
    with pytest.raises(Invalid, match=r"kvass\.toml|nmae"):
        config.load(file)
    with pytest.raises(Invalid, match="absent"):
        config.load(tmp_path / "absent.toml")


def test_the_first_difference_is_named_in_order() -> None:
    assert config.difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is None
    assert config.difference({"b": 1, "c": 1}, {"b": 2, "c": 2}) == "b"
    assert config.difference({"a": 1}, {}) == "a"
    assert config.difference({}, {"z": None, "y": 1}) == "y"
    assert config.difference({"a": 1}, {"a": 1, "device_kind": "cpu", "namespace": "00"}) is None
    assert config.difference({"device_kind": "x"}, {"device_kind": "cpu"}) == "device_kind"
    assert config.difference({"a": 1}, {"a": 1, "model_weights": "00"}) is None


def test_an_address_that_nobody_can_connect_to_is_refused() -> None:
    with pytest.raises(Invalid, match="name the address of one interface"):
        config.load(None, ["host=0.0.0.0"])


def test_settings_in_the_readme_are_settings() -> None:
    """One at a time: some need others beside them."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    given = set(re.findall(r"--set ([\w.]+=[^\s`'…]+)", text))
    given.remove("section.name=value")
    assert len(given) >= 3
    for override in given:
        config.load(None, [override])


def test_a_home_is_expanded_in_names_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    file = tmp_path / "kvass.toml"
    file.write_text('[cluster]\nsecret_file = "~/secret"\n[gateway]\napi_keys_file = "keys~"\n')
    loaded = config.load(file, ["store.flash_dir=~/flash"])
    assert loaded.store.flash_dir == "/home/ann/flash"
    assert loaded.cluster.secret_file == "/home/ann/secret"
    assert (loaded.gateway.api_keys_file, loaded.cluster.tls_ca) == ("keys~", "")
