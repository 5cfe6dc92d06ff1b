"""Training, from the command line to the compiled step.

`command` reads the command line and calls `loop.train`, which opens the `run_directory`, restores
the last checkpoint (`start`), takes the steps that `trainer` compiles and shows the `result`.
Meanwhile `checkpoint`, `metrics` and `progress` store and show what happens, `pace` how fast it
does. A checkpoint is checked by its `digest`; `noise` keeps Orbax's messages off the terminal;
`interrupt` is for Ctrl-C.
The recipe is in `optimizer`, `reinit` and `gradient_plan`; `distributed` is for several processes;
`roofline` and `dry_run` estimate what a step would cost, `memory` what can fit at all.
"""
