"""Specs: read from files, checked whole, written back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polyreme import spec
from polyreme.algo.rule import SGD
from polyreme.algo.schedule import Cosine
from polyreme.algo.train import Train
from polyreme.data.options import Digits
from polyreme.errors import ConfigError, Violation
from polyreme.graph.options import Preset, ResNet20
from polyreme.plan.options import Parallel

ROOT = Path(__file__).parent.parent
SMALL = """\
model = { kind = "resnet20" }
data = { kind = "digits" }
train = { steps = 20 }
"""


def _small(tmp_path: Path, text: str = SMALL) -> Path:
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return path


def _refused(tmp_path: Path, *overrides: str, text: str = SMALL) -> dict[str, Violation]:
    with pytest.raises(ConfigError) as caught:
        spec.load(_small(tmp_path, text), overrides)
    return {violation.path: violation for violation in caught.value.violations}


def _accepted(tmp_path: Path, *overrides: str) -> spec.Spec:
    return spec.load(_small(tmp_path), overrides)


# Files and overrides


def test_what_is_given_is_read_and_the_rest_is_default(tmp_path: Path) -> None:
    found = _accepted(tmp_path, "train.schedule={kind='cosine', warmup=3}", "parallel.shard=2")
    assert found == spec.Spec(
        model=ResNet20(),
        data=Digits(),
        train=Train(steps=20, schedule=Cosine(warmup=3)),
        parallel=Parallel(shard=2),
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [("0.5", 0.5), ("1", 1.0), ("1e-3", 1e-3), (" 2 ", 2.0), ("1_0", 10.0)],
)
def test_an_override_is_toml(tmp_path: Path, override: str, value: float) -> None:
    found = _accepted(tmp_path, f"train.clip_norm={override}")
    assert found.train.clip_norm == value
    assert isinstance(found.train.clip_norm, float)


@pytest.mark.parametrize("text", ["runs/a b", "a=b", "a # b", "x\ntrain.seed=9", "", '"runs/a b"'])
def test_an_override_that_is_no_toml_is_text(tmp_path: Path, text: str) -> None:
    found = _accepted(tmp_path, f"report.reference={text}")
    assert found.report.reference == text.strip('"')
    assert found.train.seed == 0


def test_later_overrides_win_and_tables_are_made(tmp_path: Path) -> None:
    overrides = ["data_parallel.rule={kind='SGD'}", "data_parallel.rule.lr=1", "train.steps=7"]
    found = _accepted(tmp_path, *overrides, "train.steps=8")
    assert found.data_parallel.rule == SGD(lr=1.0)
    assert found.train.steps == 8


@pytest.mark.parametrize("override", ["steps", "", "=3", "a..b=1", ".a=1", "a b=1", "a\nb=1"])
def test_what_is_no_override_is_refused_beside_everything_else(
    tmp_path: Path, override: str
) -> None:
    found = _refused(tmp_path, override, "train.seed=-1")
    assert found["--set"].value == override
    assert "train.seed" in found
    _accepted(tmp_path, found["--set"].legal.split(" ")[0])


def test_an_override_does_not_go_into_a_number(tmp_path: Path) -> None:
    found = _refused(tmp_path, "train.steps.more=3")
    assert "train.steps" in found["train.steps.more"].rule


@pytest.mark.parametrize(
    "content",
    [
        b"[model",
        b"steps = 1\nsteps = 2",
        b"\xff\xfe",
        b"a = " + b"[" * 5000,
        b"a = " + b"9" * 5000,
        b"[model.config]\n" + b".".join([b"a"] * 3000) + b" = 1",
        b"a = 1\x00",
        b"",
    ],
)
def test_a_file_that_is_no_spec_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        spec.load(path)
    for violation in caught.value.violations:
        assert violation.path
        assert violation.rule
        assert violation.legal


@pytest.mark.parametrize("name", ["missing.toml", "", "x" * 5000, "a\0b", "file/inside"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        spec.load(tmp_path / name)
    assert str(tmp_path) in caught.value.violations[0].path


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    spec.load(path)


# Types


def test_everything_is_reported_at_once(tmp_path: Path) -> None:
    found = _refused(
        tmp_path,
        "train.stepz=1",
        "train.seed=true",
        "train.schedule={kind='cosin'}",
        "data_parallel.rule={kind='SGD', nesterov=true, lr=nan}",
        "data_parallel.sync={kind='EveryStep', evry=1}",
        "parallel={shard=1, level='params', cp=2}",
        "report.target=loss",
        "train.seq_len=3",
        "modell=1",
    )
    assert set(found) == {
        "train.stepz",
        "train.seed",
        "train.schedule.kind",
        "data_parallel.rule.nesterov",
        "data_parallel.rule.lr",
        "data_parallel.sync.evry",
        "parallel.level",
        "parallel.cp",
        "report.target",
        "train.seq_len",
        "modell",
    }


def test_the_message_is_path_value_rule_legal(tmp_path: Path) -> None:
    found = _refused(tmp_path, "train.tail=xyz")
    expected = 'train.tail: "xyz" is not one of the legal values. Legal: "drop", "short", "wrap".'
    assert str(found["train.tail"]) == expected


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("stepz", "steps"),
        ("Seed", "seed"),
        ("learning_schedule", "schedule"),
        ("clip", "clip_norm"),
    ],
)
def test_the_nearest_name_comes_first(tmp_path: Path, key: str, nearest: str) -> None:
    found = _refused(tmp_path, f"train.{key}=1")
    assert found[f"train.{key}"].legal.split(", ")[0] == nearest


def test_an_array_s_item_keeps_its_index(tmp_path: Path) -> None:
    found = _refused(tmp_path, "data_parallel.rule={kind='AdamW', betas=[0.9, 1]}")
    assert found["data_parallel.rule.betas[1]"].value == 1


def test_a_wrong_length_is_refused(tmp_path: Path) -> None:
    found = _refused(tmp_path, "data_parallel.rule={kind='AdamW', betas=[0.9]}")
    assert found["data_parallel.rule.betas"].legal.startswith("[0.9, 0.999]")


def test_an_integer_is_a_number_but_a_bool_is_neither(tmp_path: Path) -> None:
    assert isinstance(_accepted(tmp_path, "train.clip_norm=2").train.clip_norm, float)
    assert set(_refused(tmp_path, "train.clip_norm=true", "train.seed=false")) == {
        "train.clip_norm",
        "train.seed",
    }
    assert "train.steps" in _refused(tmp_path, "train.steps=2.0")


def test_the_name_of_a_kind_alone_is_answered_with_its_table(tmp_path: Path) -> None:
    found = _refused(tmp_path, "train.schedule=cosine")
    assert found["train.schedule"].legal.startswith('{kind = "cosine"}')


# model: preset | path | kind


@pytest.mark.parametrize("name", ["llama-7b", "vit-base"])
def test_a_preset_needs_no_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one-class").mkdir()
    data = ["data={kind='images', path='.', size=224}"]
    if name == "llama-7b":
        data = ["data={kind='python_source'}", "train.seq_len=8"]
    found = _accepted(tmp_path, f"model={{preset='{name}'}}", *data)
    assert found.model == Preset(preset=name)
    assert "kind" not in spec.dump(found).split("[model]")[1].split("[")[0]


def test_two_of_preset_path_and_kind_are_one_too_many(tmp_path: Path) -> None:
    found = _refused(tmp_path, "model.preset=llama-7b", "model.path=x")
    assert set(found) == {"model.path", "model.kind"}
    assert _refused(tmp_path, "model={kind='preset'}")["model.kind"].legal.startswith('"transf')


def test_none_of_preset_path_and_kind_lists_them(tmp_path: Path) -> None:
    found = _refused(tmp_path, "model={width=3}")
    assert "preset, path, kind" in found["model.kind"].rule


# Combinations

_NESTEROV = "data_parallel.rule.nesterov"


@pytest.mark.parametrize(
    ("overrides", "path", "mended"),
    [
        (["train.epochs=2"], "train.epochs", None),
        (["train.schedule={kind='cosine', warmup=20}"], "train.schedule.warmup", 19),
        (["train.seq_len=8"], "train.seq_len", None),
        (["parallel.shard=1", "parallel.level=grads"], "parallel.level", "none"),
        (["parallel.plan=plan.json", "parallel.shard=2"], "parallel.shard", None),
        (["parallel.cp=2"], "parallel.cp", 1),
        (["parallel.ep=2"], "parallel.ep", 1),
        (["parallel.sp=true"], "parallel.sp", "false"),
        (["parallel={pp=1, tp=1, sp=true}"], "parallel.sp", "false"),
        (["parallel.order=1f1b"], "parallel.order", None),
        (["parallel.stages=[2]"], "parallel.stages", None),
        (["parallel={pp=2, order='1F1B'}"], "parallel.order", "1f1b"),
        (["parallel={pp=2, order='zbh1'}"], "parallel.order", "zb-h1"),
        (["parallel={pp=2, stages=[1, 1, 1]}"], "parallel.stages", "[1, 2]"),
        (["parallel={pp=2, order='zb-v', stages=[2, 2]}"], "parallel.stages", "[1, 1, 1, 1]"),
        (["parallel.replica=8", "parallel.shard=8"], "train.global_batch", 64),
        (["report.target=test_accuracy=98"], "report.target", "test_accuracy=0.98"),
        (["report.target=test_accuracy=nan"], "report.target", "test_accuracy=1"),
        (["report.target=perplexity=3"], "report.target", "heldout_loss=0"),
        (
            ["data_parallel.rule={kind='SGD', nesterov=true}"],
            "data_parallel.rule.nesterov",
            "false",
        ),
    ],
)
def test_a_combination_that_cannot_run_is_refused_and_mended(
    tmp_path: Path, overrides: list[str], path: str, mended: Any
) -> None:
    found = _refused(tmp_path, *overrides)
    assert set(found) == {path}
    if mended is None:
        assert found[path].legal.startswith("leave it out")
        _accepted(tmp_path, *[each for each in overrides if not each.startswith(f"{path}=")])
    else:
        _accepted(tmp_path, *overrides, f"{path}={mended}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.steps=1"],
        ["train.schedule={kind='linear', warmup=19}"],
        ["parallel={tp=1, pp=1, cp=1, ep=1, sp=false}"],
        ["parallel={tp=2, pp=2, sp=true, order='zb-h1', shard=2, level='params'}"],
        ["parallel={pp=2, order='zb-v', stages=[1, 2, 1, 2]}"],
        ["parallel={shard=1, level='none'}"],
        ["parallel.level=params"],
        ["parallel={replica=3, shard=5}"],
        ["parallel={microbatch=7}"],
        ["train.global_batch=6", "parallel={replica=2, shard=3}"],
        ["data_parallel.rule={kind='SGD', nesterov=true, momentum=0.1}"],
        ["report.target=test_accuracy=1"],
        ["train.precision=fp64"],
    ],
)
def test_what_can_run_is_not_refused(tmp_path: Path, overrides: list[str]) -> None:
    _accepted(tmp_path, *overrides)


def test_steps_or_epochs_must_be_given(tmp_path: Path) -> None:
    assert set(_refused(tmp_path, "train={seed=1}")) == {"train.steps"}
    _accepted(tmp_path, "train={epochs=1}")


def test_text_needs_a_sequence_length(tmp_path: Path) -> None:
    text = SMALL.replace("digits", "python_source").replace("resnet20", "char_lstm")
    assert set(_refused(tmp_path, text=text)) == {"train.seq_len"}
    wrong = _refused(tmp_path, "train.seq_len=8", "report.target=test_accuracy=0.5", text=text)
    assert set(wrong) == {"report.target"}


def test_a_spec_made_in_python_is_checked_as_strictly(tmp_path: Path) -> None:
    found = _accepted(tmp_path)
    wrong = msgspec.structs.replace(
        found, parallel=Parallel(shard=0), model="resnet20", report=spec.Report(target=3)
    )
    assert {violation.path for violation in spec.check(wrong)} == {
        "parallel.shard",
        "model",
        "report.target",
    }


# Files that are not there


def test_checks_of_a_trusted_table_are_not_asked(tmp_path: Path) -> None:
    text = 'model={kind="mlp"}\ndata={kind="arrays", path="/nowhere.npz"}\ntrain={steps=1}'
    assert set(_refused(tmp_path, text=text)) == {"data.path"}
    spec.load(_small(tmp_path, text), trusted=["data"])
    assert set(_refused(tmp_path, "data.pth=1", text=text)) == {"data.path", "data.pth"}


# Writing back


@pytest.mark.parametrize("name", ["quickstart", "digits"])
def test_a_dumped_spec_loads_back_equal(tmp_path: Path, name: str) -> None:
    found = spec.load(ROOT / "examples" / f"{name}.toml")
    text = spec.dump(found)
    assert spec.load(_small(tmp_path, text)) == found
    assert spec.dump(spec.load(_small(tmp_path, text))) == text


def test_strange_values_survive_dump(tmp_path: Path) -> None:
    strange = 'a"b\\c\n\x7f\té☃'
    small = {"model": {"preset": "llama-7b", "config": {strange: [1, 0.1, {"x": strange}]}}}
    small |= {"data": {"kind": "python_source"}}
    small |= {"train": {"steps": 1, "seq_len": 8, "clip_norm": 5e-324}}
    found = spec.parse(small | {"report": {"reference": strange}})
    assert spec.load(_small(tmp_path, spec.dump(found))) == found


def test_a_field_that_may_be_left_out_has_no_default_but_none() -> None:
    """TOML has no null: dump leaves None out, so None must be what leaving out means."""

    def optional(node: msgspec.inspect.StructType) -> list[str]:
        found = []
        for field in node.fields:
            members = getattr(field.type, "types", (field.type,))
            may_be_none = any(isinstance(each, msgspec.inspect.NoneType) for each in members)
            if may_be_none and field.default is not None:
                found.append(f"{node.cls.__name__}.{field.name}")
            for each in members:
                if isinstance(each, msgspec.inspect.StructType):
                    found += optional(each)
        return found

    assert optional(msgspec.inspect.type_info(spec.Spec)) == []


# Imports


def test_a_spec_is_read_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "blocked = ['torch', 'numpy', 'transformers', 'scipy', 'sklearn']\n"
        "for name in blocked: sys.modules[name] = None\n"
        "from polyreme import spec\n"
        f"found = spec.load(pathlib.Path({str(ROOT / 'examples' / 'quickstart.toml')!r}))\n"
        "assert spec.check(found, 2) == []\n"
        "print(len(spec.dump(found)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
