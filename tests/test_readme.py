import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_sparse_mlp_example_does_what_it_says(capsys):
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    exec(compile(example, "README.md", "exec"), {})
    error, fired = re.fullmatch(
        r"error (\S+), (\d+) of 512 neurons fire per key\n", capsys.readouterr().out
    ).groups()
    assert float(error) < 0.01 and int(fired) < 64
