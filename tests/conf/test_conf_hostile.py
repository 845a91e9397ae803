"""Numbers out of bounds, texts that no file can be named by, and YAML beyond plain values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainfit.conf import SCHEMAS, compose
from trainfit.conf.composition import as_word, keys, parse_word
from trainfit.conf.starting import read_yaml, with_file
from trainfit.core.errors import BadInput

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=20)
)


@pytest.mark.parametrize("task", SCHEMAS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400", "-1", "1e30", str(10**30)])
def test_no_key_with_a_number_takes_one_out_of_bounds(task: str, value: str):
    shipped = compose(task).values()
    numbers = [key for key, at in shipped.items() if type(at) in (int, float)]
    assert len(numbers) > 10
    for key in numbers:
        with pytest.raises(BadInput, match=f"^{key} is "):
            compose(task, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("training.num_epochs=0", "training.num_epochs is 0; use a number (0.0001 to 1,000,000)"),
        ("training.learning_rate=inf", "training.learning_rate is inf; use a number (0 to 10)"),
    ],
)
def test_a_wrong_number_is_shown_as_it_was_given(word: str, said: str):
    with pytest.raises(BadInput) as caught:
        compose("textclass", [word])
    assert str(caught.value) == said


@pytest.mark.parametrize("key", ["runs_dir", "model.name", "data.data_dir"])
@pytest.mark.parametrize("value", ["''", "' '", "a" * 256, "a/" * 2050, "x" * 30_000])
def test_a_path_that_no_system_takes_is_refused(key: str, value: str):
    with pytest.raises(BadInput) as caught:
        compose("nli", [f"{key}={value}"])
    assert len(str(caught.value)) < 500


def test_long_paths_and_those_of_other_scripts_are_taken():
    for value in ("a" * 255, "/" + "b/" * 1000, "資料　集", "C:\\data\\x", "it's"):
        composed = compose("nli", [as_word("data.data_dir", value)])
        assert composed.values()["data.data_dir"] == value


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=6))
def test_a_word_says_what_was_meant(value: Any):
    assert parse_word(as_word("model.name", value)).value() == value


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"),
        st.recursive(SCALARS, lambda inner: st.dictionaries(st.sampled_from("kl"), inner)),
    )
)
def test_plain_yaml_is_read_as_pyyaml_reads_it(data: dict[str, Any]):
    path = Path(os.environ["TRAINFIT_CACHE"]).with_name("plain.yaml")
    path.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    assert read_yaml(path) == yaml.safe_load(path.read_text(encoding="utf-8"))


BOMB = "a0: &a0 [x, x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\nseed: 2", "line 2 (the key seed is there twice)"),
        (
            "training:\n  batch_size: 4\ntraining.batch_size: 8",
            "training.batch_size is there twice",
        ),
        ("a: &a [*a]", "line 1 (a value contains itself)"),
        (BOMB, "over 2,000 values"),
        ("seed: " + "[" * 5000, "nested too deeply"),
        ("{a: " * 3000, "nested too deeply"),
        ("seed: !!binary aGk=", "line 1 (cannot take a value of type binary)"),
        ("seed: !!set {1, 2}", "cannot take a value of type set"),
        ("seed: !!python/name:os.system", "could not determine|cannot take a value of type python"),
        ("seed: " + "9" * 200, "a number is too long"),
        ("seed: !!int x", "'x' is no int"),
        ("3: 4", "a key must be a text"),
        ("seed: 1\n---\nseed: 2", "line 2"),
        ("- seed", "is no mapping"),
        ("seed: .inf", "seed is"),
        ("#" + "x" * (1 << 20), "over 1 MiB"),
    ],
)
def test_yaml_beyond_plain_values_is_refused_in_one_line(tmp_path: Path, text: str, said: str):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        compose("nli", with_file("nli", path, ()))
    assert any(one in str(caught.value) for one in said.split("|"))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["fifo", "loop", "folder", "device"])
def test_only_a_regular_file_is_a_configuration(tmp_path: Path, kind: str):
    path = tmp_path / "c.yaml"
    make = {
        "fifo": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to("c.yaml"),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    with pytest.raises(BadInput, match="cannot read"):
        with_file("nli", path, ())


def test_a_file_of_strangers_names_the_first_of_them(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(f"stranger{n}: 1" for n in range(300)))
    with pytest.raises(BadInput) as caught:
        with_file("nli", path, ())
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert "280 more" in lines[-1]


def test_every_key_still_takes_what_is_shipped():
    for task in SCHEMAS:
        values = compose(task).values()
        again = compose(task, [as_word(key, values[key]) for key in keys(task)])
        assert again.values() == values


def test_a_value_with_spaces_is_answered_with_its_quotes():
    with pytest.raises(BadInput, match="cannot read the override") as caught:
        parse_word("data.text_column=My text (raw)")
    meant = caught.value.fix.removeprefix('write it as "').removesuffix('"')
    assert parse_word(meant).value() == "My text (raw)"
