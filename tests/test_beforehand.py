"""`kvass up` says what its members would refuse before the first of them, or the broker, starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest

from kvass.common.config import load
from kvass.common.errors import Invalid
from kvass.common.membership import ROLES
from kvass.launch import up
from kvass.launch.beforehand import require_places, require_roles
from kvass.launch.up import Counts, run_up
from ports import free_port
from test_model_spec import write_model


def model(folder: Path, **changes: object) -> Path:
    write_model(folder, **changes)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cluster.max_model_len=65", "cluster.max_model_len is 65; this model has positions for"),
        ("cluster.head_groups=7", "head_groups"),
        ("prefill.pool_blocks=2", "prefill.pool_blocks gives a pool of 2 blocks"),
        ("decode.pool_blocks=1", "decode.pool_blocks gives a pool of 1 block ("),
        ("prefill.cpus=60000", "prefill.cpus is '60000'; this process may use only"),
        ("decode.cpus=x", "decode.cpus is 'x'; expected cores"),
        ("store.cpus=60000", "store.cpus is '60000'"),
    ],
)
def test_what_a_role_would_refuse(tmp_path: Path, setting: str, words: str) -> None:
    name, _, value = setting.partition("=")
    text = f"{name}='{value}'" if name.endswith("cpus") else setting
    config = load(None, [f"cluster.model='{model(tmp_path / 'model')}'", text])
    with pytest.raises(Invalid) as raised:
        require_roles(config, ROLES)
    assert words in str(raised.value)
    others = [role for role in ROLES if not setting.startswith(role)]
    if len(others) < len(ROLES):
        require_roles(config, others)


def test_a_bucket_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr("kvass.kvstore.objects.extra.find_spec", lambda name: None)
    settings = [f"cluster.model='{model(tmp_path / 'model')}'", "store.bucket=s3://blocks"]
    with pytest.raises(Invalid, match="takes a package that is not installed"):
        require_roles(load(None, settings), ROLES)


def test_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    strange = model(tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba"]}))
    lacking = model(tmp_path / "lacking")
    (lacking / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))
    for folder, words in ((strange, "architecture Mamba"), (lacking, "lack the tensor")):
        with pytest.raises(Invalid, match=words):
            require_roles(load(None, [f"cluster.model='{folder}'"]), ROLES)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("transport.interface=eth99", "transport.interface is 'eth99'; this host has "),
        ("gateway.api_keys_file=/nonexistent", "gateway.api_keys_file /nonexistent cannot be read"),
        ("cluster.secret_file=/nonexistent", "/nonexistent"),
        ("store.standalone=true", "`kvass store --standalone` runs one by itself"),
    ],
)
def test_what_is_wrong_with_a_place(setting: str, words: str) -> None:
    config = load(None, [f"gateway.port={free_port()}", setting])
    with pytest.raises(Invalid) as raised:
        require_places(config)
    assert words in str(raised.value)


def test_nothing_has_started_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*given: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(up, "_Supervisor", started)
    folder = model(tmp_path / "model")
    settings = [f"cluster.model='{folder}'", "cluster.max_model_len=65"]
    config = load(None, [*settings, f"gateway.port={free_port()}"])
    with pytest.raises(Invalid, match="max_model_len is 65"):
        anyio.run(run_up, config, Counts(), [])
