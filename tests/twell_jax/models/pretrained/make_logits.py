"""Records the logits that Hugging Face's transformers computes for the models of `theirs`.

python -m tests.twell_jax.models.pretrained.make_logits     # needs torch and transformers
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from tests.twell_jax.models.pretrained import theirs


def recorded_of(name, directory):
    """The config.json of a model, the shapes of its tensors, and its logits [2, 9, vocabulary]."""
    kind, given = theirs.THEIRS[name]
    config = getattr(transformers, f"{kind}Config")(**theirs.SHAPE | given)
    random = transformers.AutoModelForCausalLM.from_config(config)
    random.save_pretrained(directory / "random")
    written = json.loads((directory / "random/config.json").read_text())
    tensors = load_file(directory / "random/model.safetensors")
    shapes = {tensor: values.shape for tensor, values in sorted(tensors.items())}
    theirs.write(directory / "written", name, written, shapes)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "written", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model(torch.tensor(theirs.tokens(name))).logits.numpy()
    return {"config": written, "shapes": shapes}, logits


def main():
    """Writes recorded.json and recorded.npz beside this file."""
    models, logits = {}, {}
    for name in theirs.THEIRS:
        with tempfile.TemporaryDirectory() as directory:
            models[name], logits[name] = recorded_of(name, Path(directory))
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(model)}" for name, model in models.items())
    text = f'{{"made with": {json.dumps(versions)}, "models": {{\n{lines}\n}}}}\n'
    theirs.RECORDED.with_suffix(".json").write_text(text)
    np.savez_compressed(theirs.RECORDED.with_suffix(".npz"), **logits)


if __name__ == "__main__":
    main()
