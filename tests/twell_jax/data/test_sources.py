import itertools
import json

import pytest

from twell_jax.config import ConfigError, DataConfig
from twell_jax.data import sources

STDLIB = DataConfig(source="stdlib")


def files(*patterns, **settings):
    return DataConfig(source="files", paths=[str(pattern) for pattern in patterns], **settings)


def test_stdlib_is_a_corpus_of_python_source():
    paths = sources.text_files(STDLIB)
    assert paths == sorted(paths)
    assert not any("site-packages" in path.parts for path in paths)
    texts = list(itertools.islice(sources.documents(paths, STDLIB), 150))
    assert len(texts) == 150
    assert sum("import " in text for text in texts) > 75


def test_python_files_follow_their_declared_encoding(tmp_path):
    declared, broken = tmp_path / "declared.py", tmp_path / "broken.py"
    declared.write_bytes("# coding: latin-1\n# é".encode("latin-1"))
    broken.write_bytes(b"# \xff")
    assert list(sources.documents([declared, broken], STDLIB)) == ["# coding: latin-1\n# é", "# �"]


def test_a_file_may_have_the_name_of_a_glob(tmp_path):
    path = tmp_path / "notes [2023].txt"
    path.write_text("x")
    assert sources.expand([str(path)], key="data.paths") == [path]


def test_overlapping_globs_give_each_file_once(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    names = "a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.write_text(path.name)
    data = files(tmp_path / "**" / "*.txt", tmp_path / "a*", tmp_path / "b.txt")
    assert sources.text_files(data) == paths


@pytest.mark.parametrize("pattern", ["*.md", "missing.txt", "."])
def test_pattern_without_files_is_an_error(tmp_path, pattern):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"^data\.paths: .* matches no file"):
        sources.text_files(files(tmp_path / "a.txt", tmp_path / pattern))


def test_text_must_be_utf8(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.txt: not UTF-8 text at byte 3"):
        list(sources.documents([path], files(path)))


def test_jsonl_holds_a_document_per_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one\\ntwo", "id": 1}\n\n{"body": ""}\n{"body": "π"}')
    data = files(path, text_field="body")
    assert list(sources.documents([path], data)) == ["one\ntwo", "", "π"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', r"no field 'text' \(data\.text_field\); there are: body, id"),
        ('{"text": null}', "field 'text' must hold text, not NoneType"),
        ('["text"]', "must be an object"),
        ('{"text": "x"', "delimiter"),
        ('{"text": "\\ud800"}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_json_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{message}"):
        list(sources.documents([path], files(path)))


@pytest.mark.parametrize("name", ["a.json", "a.JSON"])
def test_records_in_a_file_named_json_are_documents(tmp_path, name):
    rows = [{"text": "one"}, {"text": "two"}]
    path = tmp_path / name
    as_array, as_lines = json.dumps(rows, indent=1), "\n\n".join(map(json.dumps, rows))
    for content in (as_array, "\ufeff" + as_array, as_lines):
        path.write_text(content)
        assert list(sources.documents([path], files(path))) == ["one", "two"]
    path.write_text(json.dumps(rows[0], indent=1))
    assert list(sources.documents([path], files(path))) == ["one"]


@pytest.mark.parametrize("text", ['{"name": "x"}', "[1, 2]", "[]", "// no JSON", "{broken", ""])
def test_other_files_named_json_are_texts(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert list(sources.documents([path], files(path))) == [text]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"body": "x"}]', r"object 1: no field 'text' \(data\.text_field\); there are: body"),
        ('[{"text": "x"},\n {"text"', "begins as an array of objects, but is no JSON .*; mend it"),
        ('{"text": "x"}\n{"body": "y"}', "a.json:2: no field 'text'"),
        ('[{"text": "x"}, null]', "object 2: .*must be an object"),
    ],
)
def test_broken_records_in_a_file_named_json_are_refused(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(sources.documents([path], files(path)))


def test_split_takes_the_given_share_and_grows_with_it():
    texts = [f"document {i}" for i in range(4000)]
    small, large = (
        {text for text in texts if sources.is_held_out(text, share)} for share in (0.1, 0.2)
    )
    assert small < large
    assert abs(len(small) - 400) < 100  # five standard deviations
    assert abs(len(large) - 800) < 130


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL"])
def test_json_lines_have_several_names(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(sources.documents([path], files(path))) == ["one", "two"]
