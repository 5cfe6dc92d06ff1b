"""What readers of a record must know besides: remarks by its file name without `.json`."""

_H100, _H200 = "nvidia-h100-80gb-hbm3-20261121", "nvidia-h200-20261121"
_ORDERED = "nvidia-h200-20261124"
_BEFORE_KEPT = (
    "Before sparse gradients kept the gates and h of tokens outside the unions "
    "([decision 0009](../design/0009-sparse-gradients.md))."
)
_ORDERED_STEPS = (
    "The first with neurons in the order in which train.py puts them, and with times from the end "
    "of a step to the end of the next one. One kernel computed all gradients for the weights of a "
    "block; today's two take less time ([decision 0009](../design/0009-sparse-gradients.md))."
)
_LARGEST = "One micro-batch a step, the largest that fits by XLA's count, in steps of {} sequences."

REMARKS = {
    f"ffn-goals-{_H100}": "Calls are queued behind a waiting GPU: these are GPU times at high "
    "clocks.",
    f"ffn-{_H100}": "An earlier run: `union_down` did not fetch its indices ahead, jobs were dealt "
    "out in turn, and unions took up to 3 % more time. The run ended before M = 4096.",
    f"ffn-twell-{_H100}": 'A run before there were unions: with more than 64 tokens "mosaic" is '
    "TwELL. The kernels for few tokens could not multiply dense gates yet "
    "([0008](../design/0008-decoding.md)).",
    f"gradients-98fbd7c-{_H100}": "A design that was dropped "
    "([decision 0009](../design/0009-sparse-gradients.md)).",
    "gradients-nvidia-h200-20261123": "Before two kernels made the plan of unions, and before "
    "crowded patterns, and those without room, had larger dense products.",
    "gradients-nvidia-h200-20261123-2": "The host still chose the backward, and tokens outside the "
    "unions always had products. The run ended before its last three patterns.",
    "gradients-nvidia-h200-20261123-3": "Before two kernels made the lists of tokens, and before "
    "barriers made the products of the dense fallback follow one another "
    "([decision 0009](../design/0009-sparse-gradients.md)). The tree was that of commit 5bbfaf8.",
    "gradients-nvidia-h200-20261123-5": "Before more patterns counted as crowded "
    "([decision 0009](../design/0009-sparse-gradients.md)). The run ended within its last two "
    "patterns.",
    "gradients-nvidia-h200-20261123-6": "The run ended before the block without a gate, by a "
    "mistake in the benchmark.",
    f"gradients-{_ORDERED}": _BEFORE_KEPT,
    f"inference-1p5b-{_H100}": "A later run, with jobs from a queue.",
    f"inference-cached-{_H100}": "A run before the cache was updated in place "
    "([decision 0008](../design/0008-decoding.md)).",
    "ffn-prompts-nvidia-h200-20261125": "The run ended before the block without a gate for 1023 "
    "tokens. tokamax was not installed.",
    "inference-cached-nvidia-h200-20261125": "The run ended before prefill of 32 sequences. TwELL "
    "served one prompt, as the dense block does now. The "
    "host limits `generate` for 1 and 8 sequences, to 1.6 ms a step and more, with five launches "
    "a layer. The other GPU of the machine trained models.",
    "inference-prefill-nvidia-h200-20261125": "The first in which kernels that do not need each "
    "other run at the same time ([decision 0022](../design/0022-prompts.md)). The dense block of "
    "[decision 0022](../design/0022-prompts.md) serves one prompt.",
    "inference-decode-nvidia-h200-20261125": "The run ended before 32 sequences. A layer had five "
    "launches. The thread that enqueues kernels was pinned to the core that was the quickest when "
    "the run began; a process that trained on the other GPU might use it, too.",
    "inference-decode-nvidia-h200-20261126": "The run ended before 32 sequences. Kernels share "
    "launches ([decision 0008](../design/0008-decoding.md)).",
    "inference-decode-nvidia-h200-20261126-2": "Attention for one sequence has clusters of four "
    "blocks instead of eight ([decision 0008](../design/0008-decoding.md)).",
    "inference-decode-nvidia-h200-20261126-3": "The run ended before 32 sequences. A launch has no "
    "more clusters than the GPU holds ([decision 0008](../design/0008-decoding.md)).",
    "inference-cached-nvidia-h200-20261126": "The first in which a call is timed right after its "
    "energy, and in which prompts run two layers in a turn of the loop "
    "([decision 0022](../design/0022-prompts.md)).",
    "inference-decode-nvidia-h100-80gb-hbm3-20261126": "A step has two launches fewer than in "
    "the last record of 2026-11-25. 16 processes ran tests on the other GPU and on 22 of the 32 "
    "cores.",
    "inference-decode-nvidia-h100-80gb-hbm3-20261125-2": "Kernels share launches, of which a layer "
    "has three or four ([decision 0008](../design/0008-decoding.md)). 16 "
    "processes ran tests on the other GPU and on 22 of the 32 cores.",
    "inference-decode-nvidia-h100-80gb-hbm3-20261125": "The run ended before 32 sequences. A layer "
    "had five launches.",
    "inference-cached-nvidia-h200-20261126-2": "The gate's blocks vote before they store their "
    "gates ([decision 0008](../design/0008-decoding.md)).",
    "ffn-few-nvidia-h200-20261126": "The gate's kernel makes the numbers of open gates, and its "
    "blocks on a shared SM start staggered ([0008](../design/0008-decoding.md)). "
    "tokamax was not installed.",
    "inference-cached-nvidia-h200-20261126-3": "A repetition: the kernels are those of record "
    "inference-cached-nvidia-h200-20261126-2.",
    "inference-cached-nvidia-h200-20261126-4": "Another repetition; it ended before prompts of 32 "
    "sequences.",
    "ffn-few-nvidia-h200-20261126-3": "Fewer than 8 tokens are not padded "
    "([0008](../design/0008-decoding.md)). tokamax was not installed.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261126": "The kernels are those of record "
    "ffn-few-nvidia-h200-20261126-3. tokamax was not installed.",
    "ffn-few-nvidia-h200-20261126-2": "A repetition: the kernels are those of record "
    "ffn-few-nvidia-h200-20261126. tokamax was not installed.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261125-3": "tokamax was not installed.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261125-2": "tokamax was not installed.",
    "ffn-few-nvidia-h100-80gb-hbm3-20261125": "All four blocks of a tile had to have a token with "
    "6 of 16 gates open ([0008](../design/0008-decoding.md)). tokamax was not installed.",
    "ffn-few-nvidia-h200-20261125-2": "Before the gate's kernel multiplied tiles with dense gates "
    "([0008](../design/0008-decoding.md)). tokamax was not installed.",
    "ffn-few-nvidia-h200-20261125": "Rows of dense gates were prefetched and listed, and a quartet "
    "loaded one tile of w_up at a time ([0008](../design/0008-decoding.md)). tokamax was not "
    "installed.",
    "inference-decode-nvidia-h200-20261123": "Before `generate` ran four steps in one program.",
    "inference-decode-nvidia-h200-20261123-2": "The run ended before its last rows.",
    f"inference-twell-{_H100}": "With TwELL, before a bug was found "
    "([decision 0014](../design/0014-in-place-behind-a-barrier.md)).",
    "live-nvidia-h200-20261123-2": "`gate_union` set rows that are not live to zero in every block "
    "of rows, not only in the last one ([0030](../design/0030-live-width.md)).",
    "live-nvidia-h200-20261123": "The loop copied y of each layer into an array of all layers, and "
    "XLA replaced what describes neurons that are not live.",
    "quantised-cpu-20261123": "The model of `make demo` after its 300 steps.",
    "quantised-nvidia-h200-20261123": "A model of the [study](../study.md) with an L1 of 1e-3, "
    "after 1000 steps of 32,768 tokens.",
    f"training-0p5b-{_H100}": _LARGEST.format(4),
    f"training-1p5b-{_H100}": _LARGEST.format(2),
    f"training-0p5b-{_H200}": _LARGEST.format(8),
    f"training-1p5b-{_H200}": _LARGEST.format(4) + " The record names commit 92c900d, but ran on "
    "138ade9; between them are tests and the order in which the benchmark allocates.",
    f"training-0p5b-{_ORDERED}": _ORDERED_STEPS,
    f"training-2b-{_ORDERED}": _ORDERED_STEPS,
    "training-nvidia-h100-80gb-hbm3-20261120": "Four micro-batches a step, random weights that "
    "fire half of the neurons.",
    "wallclock-nvidia-h200-20261123": "Before all sparse layers had the same room: the sparse run "
    "has pauses of 202 s, the others of 15 s "
    "([decision 0009](../design/0009-sparse-gradients.md)). The SiLU run had the second GPU of "
    "the machine, at the same time as the ReLU run.",
    "wallclock-nvidia-h200-20261123-2": "The SiLU run had the second GPU of the machine, at the "
    "same time as the sparse run.",
    "wallclock-nvidia-h200-20261125": "Other than above: a target of 6 % for U with half a lasso, "
    "dead neurons skipped, and 800 steps of 65,536 tokens to the end of the decay "
    "([the study](../study.md) says more). Other processes had the second GPU. The ReLU run was "
    "stopped at step 233 and continued; its steps 201 to 250 and 301 to 350 took 9 and 10 s longer "
    "than others.",
}
