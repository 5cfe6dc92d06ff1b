"""Training, from the command line to the compiled step.

`command` reads the command line and calls `loop.train`, which opens the `run_directory`, asks
`start` where the run stands, takes the steps that `trainer` compiles and shows the `result`.
Meanwhile `checkpoint`, `metrics` and `progress` keep and show what happens. The recipe is in
`optimizer`, `reinit` and `gradient_plan`; `distributed` is for several processes; `roofline` and
`dry_run` say what a step would cost.
"""
