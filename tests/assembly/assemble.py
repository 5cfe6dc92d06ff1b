"""Assembles kernels by JAX's CUDA plugin, where there may be no GPU.

    python tests/assembly/assemble.py PLUGIN DIRECTORY

compiles each DIRECTORY/NAME.module; the environment has the plugin leave what ptxas says of it in a
folder of this name. That it can load nothing afterwards is no error.
"""

import ctypes
import os
import sys
from pathlib import Path

plugin, directory = sys.argv[1], Path(sys.argv[2])
compiled = ctypes.CDLL(plugin).MosaicGpuCompile
compiled.argtypes = [ctypes.c_char_p, ctypes.c_int]
compiled.restype = ctypes.c_void_p
for path in sorted(directory.glob("*.module")):
    target = path.with_suffix("")
    target.mkdir()
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(target)
    code = path.read_bytes()
    compiled(code, len(code))
