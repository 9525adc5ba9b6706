"""The cluster's secret: where it is looked for, how it is made, and that it is never shown."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvass.common import config, secret
from kvass.common.errors import Invalid
from kvass.common.secret import CHARACTERS_MIN, VARIABLE, Secret, own_file, secret_of

WORDS = "nobody else knows this"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def mac(found: Secret) -> bytes:
    return found.mac(b"test")


def test_the_environment_wins_then_the_config_then_the_users_own(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, toml = own_folder / "secret", own_folder / "kvass.toml"
    file.write_text(f"{WORDS} in a file\n")
    toml.write_text(f"[cluster]\nsecret = '{WORDS} in the config'\n")
    named = config.load(None, [f"cluster.secret_file={file}"]).cluster
    assert mac(secret_of(named)) == mac(Secret(f"{WORDS} in a file", ""))
    written = config.load(toml).cluster
    assert mac(secret_of(written)) == mac(Secret(f"{WORDS} in the config", ""))
    made = secret_of(config.ClusterConfig())
    assert mac(made) == mac(secret_of(config.ClusterConfig())), "kept"
    assert made.source == str(own_file()) and str(own_folder) in made.source
    monkeypatch.setenv(VARIABLE, WORDS)
    for cluster in (named, written, config.ClusterConfig()):
        assert mac(secret_of(cluster)) == mac(Secret(WORDS, "")), "the environment"


def test_the_own_secret_is_long_and_its_users_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    secret_of(config.ClusterConfig())
    mode = own_file().stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(own_file().parent.stat().st_mode) == 0o700
    assert len(own_file().read_text()) == 64 and own_file().read_text() not in caplog.text
    assert list(own_file().parent.iterdir()) == [own_file()], "no draft is left"


def test_members_that_start_together_make_one_secret(own_folder: Path) -> None:
    code = (
        "from kvass.common import config, secret; import sys; sys.stdin.read(1); "
        "print(secret.secret_of(config.ClusterConfig()).mac(b'test').hex())"
    )
    members = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    said = set()
    for member in members:  # all have imported by the time that the last one is told to go on
        assert member.stdin is not None
        member.stdin.write("x")
        member.stdin.flush()
    for member in members:
        said.add(member.communicate(timeout=30)[0])
    assert len(said) == 1 and len(said.pop()) == 65


@pytest.mark.parametrize("text", ["", "short", "x" * (CHARACTERS_MIN - 1), "x" * 2000])
def test_a_secret_that_could_be_guessed_is_refused_without_being_shown(
    own_folder: Path, text: str
) -> None:
    file = own_folder / "secret"
    file.write_text(text)
    with pytest.raises(Invalid, match=r"characters; expected 16 to 1024.*openssl rand") as caught:
        secret_of(config.load(None, [f"cluster.secret_file={file}"]).cluster)
    assert not text or f"{text} " not in str(caught.value)


def test_what_cannot_be_read_or_made_is_named(own_folder: Path) -> None:
    absent = own_folder / "absent"
    with pytest.raises(Invalid, match=f"secret_file {absent} cannot be read"):
        secret_of(config.load(None, [f"cluster.secret_file={absent}"]).cluster)
    own_file().parent.parent.mkdir(parents=True)
    own_file().parent.write_text("a file where a folder should be")
    with pytest.raises(Invalid, match=f"{VARIABLE} and cluster.secret_file are not set"):
        secret_of(config.ClusterConfig())


def test_a_file_that_everybody_can_read_is_told(
    own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = own_folder / "secret"
    file.write_text(WORDS)
    for mode, told in ((0o640, False), (0o644, True)):
        file.chmod(mode)
        caplog.clear()
        secret_of(config.load(None, [f"cluster.secret_file={file}"]).cluster)
        assert ("chmod 600" in caplog.text) is told and WORDS not in caplog.text


def test_nothing_shows_it(own_folder: Path) -> None:
    toml = own_folder / "kvass.toml"
    toml.write_text(f"[cluster]\nsecret = '{WORDS}'\n")
    loaded = config.load(toml)
    found = secret_of(loaded.cluster)
    for shown in (repr(loaded), str(loaded.cluster), repr(found), str(found), found.source):
        assert WORDS not in shown
    toml.write_text(f"[cluster]\nsecret = ['{WORDS}']\n")
    with pytest.raises(Invalid, match=r"cluster\.secret") as caught:
        config.load(toml)
    assert WORDS not in str(caught.value)


@pytest.mark.parametrize("override", [f"cluster.secret={WORDS}", f' cluster.secret ="{WORDS}"'])
def test_a_command_line_is_no_place_for_it(override: str) -> None:
    with pytest.raises(Invalid, match="command lines; put it into KVASS_CLUSTER_SECRET") as caught:
        config.load(None, [override])
    assert WORDS not in str(caught.value)


def test_two_places_at_once_are_one_too_many(own_folder: Path) -> None:
    toml = own_folder / "kvass.toml"
    toml.write_text(f"[cluster]\nsecret = '{WORDS}'\nsecret_file = 'x'\n")
    with pytest.raises(Invalid, match="both set"):
        config.load(toml)


def test_a_mac_is_for_one_purpose_and_one_cut() -> None:
    one = Secret(WORDS, "the test")
    assert one.signed(one.mac(b"a", b"bc"), b"a", b"bc")
    for purpose, parts in ((b"b", (b"bc",)), (b"a", (b"b", b"c")), (b"ab", (b"c",)), (b"a", ())):
        assert not one.signed(one.mac(b"a", b"bc"), purpose, *parts)
    assert not Secret(f"{WORDS}!", "").signed(one.mac(b"a"), b"a")
    assert not one.signed(b"", b"a") and not one.signed(one.mac(b"a")[:-1], b"a")


def test_another_users_file_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that make one at once, the later keeps what the earlier has made."""
    first = secret_of(config.ClusterConfig())
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert mac(secret_of(config.ClusterConfig())) == mac(first)
    assert os.listdir(own_file().parent) == [secret.own_file().name]
