"""Training, from the command line to the compiled step.

`command` reads the command line and calls `loop.train`, which opens the `run_directory`, restores
the last checkpoint or takes parameters from elsewhere (`init_from`), takes the steps that `trainer`
compiles, some of them ahead (`compile_ahead`), and shows the `progress` and the result. Meanwhile
`checkpoint` and `metrics` store what happens, `pace` measures how fast, and `plots` draws it.
The recipe is in `optimizer`, `sparsity_control`, `neurons` and `gradient_plan`; what a step changes
and measures is the `state`. `interrupt` is for Ctrl-C, `utf8` for locales, `distributed` for
several processes, `compilation_cache` for compiled programs; `roofline` estimates what a step would
cost, `memory` what can fit at all.
"""
