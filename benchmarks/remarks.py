"""What readers of a record must know besides: remarks by its file name without `.json`."""

_H100, _H200 = "nvidia-h100-80gb-hbm3-20261121", "nvidia-h200-20261121"
_LATER_H100 = "nvidia-h100-80gb-hbm3-20261127"
_LARGEST = "One micro-batch a step, the largest that fits by XLA's count, in steps of {} sequences."
_REBASED = "The record names commit {}, which was moved: {} has what ran."
_NO_TOKAMAX = "tokamax was not installed."

REMARKS = {
    f"ffn-goals-{_LATER_H100}": f"Other programs ran on the other three GPUs. {_NO_TOKAMAX}",
    f"ffn-borders-4096-{_LATER_H100}": "The run ended before unions of 16,384 tokens, dense tokens "
    "and blocks without a gate. Other programs ran on the other three GPUs.",
    "ffn-borders-4096-nvidia-h200-20261127": "The run has fewer cases; those without a gate came "
    "first. Tests ran on the other GPU.",
    f"ffn-borders-896-{_LATER_H100}": "The run ended before unions of 1024 tokens without a gate. "
    "Other programs ran on the other three GPUs.",
    **{
        f"{name}-{_LATER_H100}": "Other programs ran on the other three GPUs."
        for name in (
            "ffn-borders-1024",
            "inference",
            "training-2b",
            "training-0p5b",
            "tune",
        )
    },
    **{
        f"{name}-nvidia-h200-20261127": "Other programs ran on the other GPU."
        for name in ("ffn-borders-2048", "ffn-non-gated")
    },
    f"ffn-{_H100}": "An earlier run: `union_down` did not fetch its indices ahead, jobs were dealt "
    "out in turn, and unions took up to 3 % more time. The run ended before M = 4096.",
    "ffn-prompts-nvidia-h200-20261125": "The run ended before the block without a gate for 1023 "
    f"tokens. {_NO_TOKAMAX}",
    "ffn-few-nvidia-h200-20261126-3": _NO_TOKAMAX,
    "ffn-few-nvidia-h200-20261127": "The run ended before some cases with one dense token. "
    f"Other programs ran on the other GPU. {_NO_TOKAMAX}",
    "ffn-few-nvidia-h100-80gb-hbm3-20261126": _NO_TOKAMAX,
    f"inference-1p5b-{_H100}": "A later run, with jobs from a queue.",
    **{
        f"{name}-nvidia-h100-80gb-hbm3-20261128": "Other programs ran on the other three GPUs."
        for name in ("inference-decode", "gradients")
    },
    "inference-cached-nvidia-h200-20261126-3": "The last run with prompts of 32 sequences.",
    "inference-cached-nvidia-h200-20261129": "The run ended before kernels for 32 sequences. Other "
    "programs ran on the other GPU.",
    "inference-cached-nvidia-h200-20261126-4": "The run ended before prompts of 32 sequences.",
    "live-nvidia-h200-20261123-2": "`gate_union` set rows that are not live to zero in every block "
    "of rows, not only in the last one.",
    "quantised-cpu-20261123": "The model of `make demo` after its 300 steps.",
    "quantised-nvidia-h200-20261123": "A model of the [study](../study.md) with an L1 of 1e-3, "
    "after 1000 steps of 32,768 tokens.",
    "training-float8-0p5b-nvidia-h200-20261129-2": "Tests ran on the other GPU.",
    "training-float8-2b-nvidia-h200-20261129-4": "The run ended before SiLU in float8. Tests "
    "ran on the other GPU.",
    "precision-nvidia-h200-20261128": "Logits and their gradient for tokens had operands of 8 "
    "bits, of which the gradient no longer has. Several runs shared a GPU.",
    "precision-nvidia-h200-20261128-2": "Several runs shared a GPU. Without logits in 8 bits, but "
    "with all else, the increase was -0.14, 0.27 and 0.39 %.",
    f"training-1p5b-{_H100}": _LARGEST.format(2),
    f"training-0p5b-{_H200}": _LARGEST.format(8),
    f"training-1p5b-{_H200}": _LARGEST.format(4) + " The record names commit 92c900d, but ran on "
    "138ade9; between them are tests and the order in which the benchmark allocates.",
    "wallclock-nvidia-h200-20261125": "Both runs ended after 800 steps of 65,536 tokens, with the "
    "decay of the learning rate; the sparse one had a target of 6 % for U with half a lasso, and "
    "skipped dead neurons ([the study](../study.md#a-longer-run) compares them). Other processes "
    "had the second GPU. The ReLU run was stopped at step 233 and continued; its steps "
    "201 to 250 and 301 to 350 took 9 and 10 s longer than others.",
    "wallclock-nvidia-h200-20261129-3": "Each run had a call and a GPU of its own: ReLU on a host "
    "with one, the sparse run with float8 on one with two, of which the other had benchmarks of "
    "torch, the others on one with four. SiLU's and the sparse run without float8 are of commit "
    "34d278b, ReLU's of 6a7dced. In that sparse run steps waited up to 4 s for a plan's program; "
    "today none does.",
    "training-float8-2b-nvidia-h200-20261129-3": "Two more steps of each row were profiled. "
    "Training and tests ran on the other GPU. The run ended before Qwix.",
    **{
        f"training-data-parallel-float8{name}-nvidia-h200-20261129": f"One micro-batch of {n} x "
        f"2048 tokens a step; shipped configurations sum more before they reduce gradients.{more}"
        for name, n, more in (
            ("", 8, ""),
            ("-24", 24, ""),
            ("-32", 32, " The run ended before FSDP."),
        )
    },
    "engines-nvidia-h200-20261130-2": "Tests ran on the other GPU.",
    "engines-ampere-nvidia-h200-20261130": "Tests ran on the other GPU. The product by mma.sync "
    "stores 4 bytes of a lane at once; blocks do not.",
    "gradients-nvidia-h200-20261130": _REBASED.format("1d0b09c", "761e62e") + " It ended "
    "before the block without a gate by use. Other programs ran on the other GPU.",
    "torch_scoring-nvidia-h200-20261129-3": "The block's benchmark and tests ran on the other GPU.",
    "training-documents-0p5b-nvidia-h200-20261129": "Attention does not reach across documents.",
}
