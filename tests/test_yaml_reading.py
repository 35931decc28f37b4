"""Recipe files and overrides in all conditions: always a recipe, or one line that says where."""

from __future__ import annotations

import time

import pytest

from srpo_jax.recipe.errors import RecipeError
from srpo_jax.recipe.recipe import load_recipe, parse_recipe
from srpo_jax.recipe.yaml import parse_yaml, read_yaml
from tests.recipe_cases import MINIMAL

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400 and error.value.exit_code == 2
    return text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: caf\xe9\n", ":1: not UTF-8: byte 0xe9"),
        (b"a: 1\nb: \xff\n", ":2: not UTF-8: byte 0xff"),
        ("a: 1\n".encode("utf-16"), ":1: not UTF-8: byte 0xff"),
        (b"a: 1\nb: x\x00y\n", ":2: the character 0x0 is not text"),
        (b'a: "\\ud800"\n', ":1: this cannot be read as str"),
        (b"a: " + b"[" * 100_000, ": nested deeper than 50 levels"),
        (b"a: " + b"{a: " * 100_000, ": nested deeper than 50 levels"),
        (b"a: " + b"[" * 60 + b"]" * 60, ":1: nested deeper than 50 levels"),
        (b"a: &x [*x]\n", ":1: nested deeper than 50 levels"),
        (b"a: &x {b: *x}\n", ":1: nested deeper than 50 levels"),
        (BOMB.encode(), ": more than 100,000 values, aliases written out"),
        (BOMB.replace("[", "{<<: [").replace("]", "]}").replace("x", "{k: 1}").encode(), ": more"),
        (b"a: 1\nb: " + b"9" * 5000, ":2: this cannot be read as int"),
        (b"a: 1\n[1, 2]: 3\n", ":2: a key is text, not a list or a mapping"),
        (b"a: 1\n{b: 2}: 3\n", ":2: a key is text, not a list or a mapping"),
        (b"a: !!int x\n", ":1: this cannot be read as int"),
        (b"a: !!bool x\n", ":1: this cannot be read as bool"),
        (b"a: !!timestamp x\n", ":1: this cannot be read as timestamp"),
        (b"a: !!set 3\n", ":1: expected a mapping node"),
        (b"a: !!python/object/apply:os.getcwd []\n", ":1: could not determine a constructor"),
        (b"a: *nowhere\n", ":1: found undefined alias"),
        (b"a: 1\n---\nb: 2\n", ":2: but found another document"),
        (b"- a\n", ": must be a mapping of keys, got a list"),
        (b"", ": must be a mapping of keys, got nothing"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of git-lfs"),
    ],
)
def test_a_recipe_that_cannot_be_read_names_the_file_and_the_line(content, message, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    start = time.monotonic()
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert time.monotonic() - start < 10
    text = one_line(caught)
    assert text.startswith(str(path)) and message in text


def test_what_is_no_file_is_named(tmp_path):
    def named(name: str) -> str:
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / name)
        text = one_line(caught) if len(name) < 100 else str(caught.value)
        assert str(tmp_path / name) in text
        return text

    (tmp_path / "folder.yaml").mkdir()
    assert "must be a file, got a folder" in named("folder.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "symbolic links" in named("loop.yaml")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in named("file/r.yaml")
    assert "File name too long" in named("r" * 300)
    assert "no such file" in named("none.yaml")


def test_a_base_in_a_circle_or_of_the_wrong_make(tmp_path):
    def refused(content: str) -> str:
        (tmp_path / "r.yaml").write_text(content)
        with pytest.raises(RecipeError) as caught:
            load_recipe(tmp_path / "r.yaml")
        return one_line(caught)

    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "loop.yaml: " in refused("base: loop.yaml")
    assert "leads back" in refused("base: ./r.yaml")
    assert "base: .: must be a file, got a folder" in refused("base: .")
    assert "base: must be a file name, got a list" in refused("base: [a]")
    (tmp_path / "base.yaml").write_text("workflow: [math]\nretriever: x\n")
    change = MINIMAL.replace("workflow: math", "workflow: {name: math}\nretriever: {kind: bm25}")
    assert "retriever: `kind: bm25` needs `corpus`" in refused("base: base.yaml\n" + change)


def test_a_byte_order_mark_and_a_modest_alias_are_read(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert load_recipe(path).name == "tiny"
    text = "a: &a {k: 1, l: [1, 2]}\nb: {<<: *a, k: 2}\nc: [*a, *a]\nn: " + "9" * 400
    read = parse_yaml(text, "t")
    assert read["b"] == {"k": 2, "l": [1, 2]} and read["c"] == [read["a"]] * 2
    assert read["n"] == int("9" * 400)


def test_a_recipe_in_the_case_where_reading_is_not_allowed(tmp_path, monkeypatch):
    """By a failing open: the tests may run as root, who reads everything."""
    (tmp_path / "r.yaml").write_text(MINIMAL)

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(RecipeError, match=r"r\.yaml: Permission denied$"):
        read_yaml(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workflow.args=" + "[" * 100_000, "nested deeper than 50 levels"),
        ("workflow.args.x=" + "[" * 60 + "]" * 60, "nested deeper than 50 levels"),
        ("a." * 5000 + "b=1", "nested deeper than 50 levels"),
        ("optimizer.lr=" + "9" * 5000, "this cannot be read as int"),
        ("optimizer.lr=" + "9" * 400, "optimizer.lr: "),
        ("workflow.args={[1]: 2}", "a key is text, not a list or a mapping"),
        ("workflow.args={1: 2}", "workflow.args.1"),
        ("model=&a [*a]", "nested deeper than 50 levels"),
        ("name=a\x00b", "the character 0x0 is not text"),
        ("name=\udcff", "the character 0xdcff is not text"),
        ('name="\\ud800"', "this cannot be read as str"),
        ("name=" + "x y" * 3000, "name: "),
        ("rollout.slots=" + "x" * 9000, "rollout.slots: must be a whole number, got 'xxx"),
        ("trainer.steps={a: ", "expected the node content"),
    ],
)
def test_an_override_that_cannot_be_used_is_one_short_line(override, message):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(parse_yaml(MINIMAL, "m"), [override])
    assert message in one_line(caught)
