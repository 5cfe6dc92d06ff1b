"""The report of a run as the card of its export, with the images that it shows."""

import os

import pytest
import yaml

from tests.commands import succeeded
from tests.twell_jax import drawn, untrained
from twell_jax.models.pretrained import PretrainedError, from_pretrained
from twell_jax.train import exported

MODEL = drawn.SMALL | {"vocab_size": 257, "context": 32}
PNG = b"\x89PNG of a plot"
REPORT = """\
# tiny

2 layers, d_model 32.

## Result

![training](training.png) ![far](https://example.org/far.png) ![deep](plots/deep.svg)

````
A sample: ![x](../secret.png)
```
![x](no.png)
````

| a | b |
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config, paths = untrained.begin(tmp_path_factory.mktemp("exported") / "run", MODEL)
    untrained.save(config, paths)
    return paths


@pytest.fixture
def reported(run):
    """A run with a report; `reported(text)` gives it another one."""

    def write(text=REPORT):
        run.report.write_text(text)
        return run

    for name in ("training.png", "plots/deep.svg"):
        (run.directory / name).parent.mkdir(exist_ok=True)
        (run.directory / name).write_bytes(PNG)
    yield write
    run.report.unlink()


def test_the_report_and_its_images_are_the_card(reported, tmp_path, caplog):
    run, out = reported(), tmp_path / "out"
    process = succeeded("-m", "twell_jax.export", run.directory, out)
    assert process.stdout == f"model: {out}\n"
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    heading, rest = REPORT.split("\n", 1)
    assert text.startswith(f"\n{heading}\n\n## Loading\n\n```python\nimport transformers\n")
    assert text.endswith(f"```\n{rest}") and 'name = "out"' in text
    for name in ("training.png", "plots/deep.svg"):
        assert (out / name).read_bytes() == PNG
    assert not list(out.rglob("far.png")) and not caplog.messages
    assert from_pretrained(out).config.d_ff == 48


@pytest.mark.slow
def test_a_quantised_run_has_the_same_card(reported, tmp_path):
    run, out = reported(), tmp_path / "out"
    succeeded("-m", "twell_jax.quantise", run.directory, out)
    text = (out / "README.md").read_text()
    assert "- fp8\n" in text and "compressed-tensors" in text and "| a | b |" in text
    assert (out / "training.png").exists()
    assert from_pretrained(out).quantised() == ("gate", "up")


def test_a_run_without_a_report_has_a_short_card(run, tmp_path):
    exported.export_run(str(run.directory), tmp_path / "out", name="org/tiny")
    text = (tmp_path / "out/README.md").read_text()
    assert "\n# tiny\n" in text and "2 layers, d_model 32, d_ff 48, relu" in text
    assert 'from_pretrained("org/tiny")' in text


def test_an_image_that_is_not_there_is_a_warning(reported, tmp_path, caplog):
    run = reported("# tiny\n\n![gone](gone.png)\n")
    exported.export_run(str(run.directory), tmp_path / "out")
    assert caplog.messages == [f"{run.report}: shows gone.png, which is not there"]


@pytest.mark.parametrize("name", ["../secret.png", "/etc/secret.png", "a/../../secret.png"])
def test_images_elsewhere_are_refused_before_anything_is_written(reported, tmp_path, name):
    run = reported(f"# tiny\n\n![x]({name})\n")
    (run.directory.parent / "secret.png").write_bytes(PNG)
    with pytest.raises(PretrainedError, match="all images must be in the directory of the run"):
        exported.export_run(str(run.directory), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_image_that_is_a_link_out_of_the_run_is_refused(reported, tmp_path):
    run = reported("# tiny\n\n![x](linked.png)\n")
    (tmp_path / "secret").write_text("a key")
    (run.directory / "linked.png").symlink_to(tmp_path / "secret")
    with pytest.raises(PretrainedError, match=r"linked.png: is a link that leads out of its dir"):
        exported.export_run(str(run.directory), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.png"))
    (run.directory / "linked.png").unlink()
    os.mkfifo(run.directory / "linked.png")
    with pytest.raises(OSError, match="not a regular file"):
        exported.export_run(str(run.directory), tmp_path / "again")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"no heading", r"report\.md: does not begin with a heading, as reports do; write one, or"),
        (b"# \xff", r"report\.md: is no text"),
        (b"# " + b"x" * 2**24, r"report\.md: cannot be read \(larger than 16 MiB\)"),
    ],
)
def test_a_report_that_is_none_is_one_line(reported, tmp_path, content, says):
    run = reported()
    run.report.write_bytes(content)
    with pytest.raises(PretrainedError, match=says) as error:
        exported.export_run(str(run.directory), tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
