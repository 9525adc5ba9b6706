"""Every field of every message has bounds: numbers, texts, lists and maps. And no pickle, which
has none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from kvass.common import seal, wire
from kvass.common.membership import Peer
from kvass.common.rpc import frames, hello
from kvass.kvstore import erasure
from kvass.kvstore import messages as m

ROOT = Path(__file__).parent.parent
# Modules that build objects out of bytes as the bytes say.
UNSAFE = {
    *("pickle", "_pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib", "yaml"),
}


def messages() -> list[type[msgspec.Struct]]:
    found = [
        each
        for module in (wire, m, erasure)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, wire.Message) and each.__struct_config__.tag
    ]
    others: list[type[msgspec.Struct]] = [frames._ErrorBody, hello._Greeting, Peer, seal.Command]
    return [*dict.fromkeys(found), *others]


def unbounded(kind: inspect.Type, path: str) -> Iterator[str]:
    """Yield the paths below a type where a peer could send as much, or as large, as it likes."""
    match kind:
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{path}.{field.name}")
        case inspect.UnionType(types=types):
            for each in types:
                yield from unbounded(each, path)
        case inspect.IntType(ge=low, le=high, lt=below):
            # xxh3-64 takes all that msgpack has; no bound of msgspec is over 63 bits.
            if low is None or (high is None and below is None and low != 0):
                yield f"{path}: int"
        case inspect.FloatType(ge=low, gt=above, le=high):
            if (low is None and above is None) or high is None:
                yield f"{path}: float"
        case inspect.StrType(max_length=longest, pattern=pattern):
            if longest is None and (pattern is None or not pattern.endswith(r"\Z")):
                yield f"{path}: str"
        case inspect.BytesType(max_length=longest):
            if longest is None:
                yield f"{path}: bytes"
        case inspect.VarTupleType(item_type=item, max_length=longest):
            if longest is None:
                yield f"{path}: tuple"
            yield from unbounded(item, f"{path}[]")
        case inspect.TupleType(item_types=items):
            for number, each in enumerate(items):
                yield from unbounded(each, f"{path}[{number}]")
        case inspect.DictType(key_type=key, value_type=value, max_length=longest):
            if longest is None:
                yield f"{path}: dict"
            yield from unbounded(key, f"{path} key")
            yield from unbounded(value, f"{path}{{}}")
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            pass
        case _:
            yield f"{path}: {kind}"


@pytest.mark.parametrize("kind", messages(), ids=lambda kind: kind.__name__)
def test_every_field_is_bounded(kind: type[msgspec.Struct]) -> None:
    assert list(unbounded(inspect.type_info(kind), kind.__name__)) == []


def test_what_has_no_bound_is_found() -> None:
    class Loose(msgspec.Struct):
        number: int
        share: float
        text: str
        data: bytes
        many: tuple[int, ...]
        named: dict[str, wire.Name]
        anything: object

    found = [each.partition(".")[2] for each in unbounded(inspect.type_info(Loose), "Loose")]
    assert [each.partition(":")[0] for each in found] == [
        *("number", "share", "text", "data", "many", "many[]", "named", "named key", "anything"),
    ]


def test_no_module_of_ours_unpickles() -> None:
    for folder in ("common", "kvstore", "prefill", "decode", "gateway", "infra/launch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = {alias.name.partition(".")[0] for alias in node.names}
                    names.add((getattr(node, "module", None) or "").partition(".")[0])
                    assert not names & UNSAFE, f"{path}: {names & UNSAFE}"
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in {"eval", "exec", "__import__"}, f"{path}: {called}"
                    if called in {"torch.load", "np.load", "numpy.load"}:
                        raise AssertionError(f"{path}: {called} may unpickle")
