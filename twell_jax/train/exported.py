"""Writes a run in Hugging Face's format, with its report as the model card."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from twell_jax import untrusted
from twell_jax.models.pretrained import PretrainedError, card, companions, hub, save_pretrained
from twell_jax.models.quantised import Part
from twell_jax.train.run_directory import RunPaths, load_run

log = logging.getLogger(__name__)

_MOST_BYTES = 2**24  # of a report
_FENCED = re.compile(r"^(`{3,})[^`\n]*\n.*?^\1`*\s*$", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r"!\[[^\]\n]*\]\(([^)\s]+\.(?:png|svg|jpe?g|gif|webp))\)", re.IGNORECASE)


def export_run(
    run_dir: str,
    directory: str | Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    parts: Sequence[Part] = (),
) -> None:
    """Writes the model of a run's last checkpoint, its tokenizer, its report and the images in it.

    Args:
      run_dir: of the run.
      directory, dtype, max_shard_bytes: as in `save_pretrained`.
      name: of the model on the hub, for its card; None if it has none.
      parts: what becomes 8-bit floats, as in `Transformer.quantise`.

    Raises:
      ConfigError: there is no run in `run_dir`, or it has no checkpoint yet.
      CheckpointError: no checkpoint is whole.
      PretrainedError: see `save_pretrained`; or the report, or an image of it, cannot be read.
      ValueError: a weight to quantise holds an inf or a NaN.
    """
    paths = RunPaths(run_dir)
    report = _report(paths)
    shown = [] if report is None else _images(paths, report)
    _, tokenizer, model = load_run(run_dir)
    kept = hub.Source(paths.source) if paths.source.exists() else None
    model.quantise(parts)
    save_pretrained(
        directory, model, tokenizer, dtype=dtype, max_shard_bytes=max_shard_bytes, source=kept
    )
    directory = Path(directory).expanduser()
    for image in shown:
        (directory / image).parent.mkdir(parents=True, exist_ok=True)
        companions.copy(paths.directory, image, directory)
    card.write(directory, name, card.origin(kept) if kept else {}, report)


def _report(paths: RunPaths) -> str | None:
    """The text of a run's report; None if it has none."""
    if not paths.report.exists():
        return None
    try:
        text = untrusted.read(paths.report, _MOST_BYTES).decode()
    except OSError as error:
        raise PretrainedError(f"{paths.report}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise PretrainedError(f"{paths.report}: is no text ({error})") from None
    if not re.match(r"\s*# ", text):
        raise PretrainedError(
            f"{paths.report}: does not begin with a heading, as reports do; write one, or remove it"
        )
    return text


def _images(paths: RunPaths, report: str) -> list[str]:
    """The names of the images that a report shows, of files in the run; warns if one is missing.

    Raises:
      PretrainedError: a name leads out of the run's directory.
    """
    found = []
    for image in dict.fromkeys(_IMAGE.findall(_FENCED.sub("", report))):
        if "://" in image:
            continue
        if not untrusted.is_inside(image):
            raise PretrainedError(
                f"{paths.report}: shows {image}; all images must be in the directory of the run"
            )
        if (paths.directory / image).exists():
            found.append(image)
        else:
            log.warning("%s: shows %s, which is not there", paths.report, image)
    return found
