"""The whole feed-forward block for few tokens (decoding); its cost is reading the weights.

There are two kernels. The gate kernel streams w_gate through shared memory, once: each block
multiplies 64 neurons with all tokens by WGMMA. The row kernel reads only the rows of w_up and
w_down that a token needs: the blocks of a cluster share out the token's non-zeros evenly, walk them
(`gather.gather_ffn`) and send each other their sums, which are added in a fixed order. No row
overflows: each non-zero costs 4 D bytes of weights, mostly from L2.

To hide latency (docs/design/0008-few-tokens.md), the gate kernel prefetches into L2 the rows that
will be needed, and each kernel is launched while the one before it still runs (programmatic
dependent launch). A kernel reads what the one before it writes only after `griddepcontrol_wait`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper import support, token_rows
from pallas_kernels.hopper.device import gather, simt, versions
from pallas_kernels.layouts.weights import Weights

MAX_TOKENS = 64
_TILE_NEURONS = 64  # neurons of a block of the gate kernel: the rows of a WGMMA
_STAGE_K = 128  # columns of x and w_gate in a stage of the gate kernel


@dataclasses.dataclass(frozen=True)
class FewTokensConfig:
    """Schedule of `few_tokens_ffn` on Hopper.

    Attributes:
      stages: stages of the gate kernel's ring in shared memory, 2 to 6; each takes 18 to 32 KiB.
      row_loads: 16-byte loads from each weight matrix that a lane of the row kernel keeps in
        flight, or one row's worth where that is more; from 17 tokens on 3/4 as many, for three
        blocks on an SM rather than two.
    """

    stages: int = 6
    row_loads: int = 8

    def __post_init__(self):
        if not 2 <= self.stages <= 6:
            raise ValueError(f"stages must be from 2 to 6, got {self.stages}")


def few_tokens_ffn(
    x: jax.Array, weights: Weights, *, config: FewTokensConfig = FewTokensConfig()
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `y = (relu(x @ w_gate^T) * (x @ w_up^T)) @ w_down` for at most 64 tokens.

    The non-gated form is `y = relu(x @ w_up^T) @ w_down`. The gate is rounded to the dtype of x,
    all else is float32 until y is rounded; sums have a fixed order. Behind a gate of zero, no row
    of w_up or w_down is read (in the non-gated form, of w_down). Where x is not finite, the gated
    result is NaN as in the dense computation, where a gate of zero then meets inf or NaN.

    Args:
      x: `[M, D]`, bfloat16 or float16, M from 1 to 64, D a multiple of 64 from 128 to 8192.
      weights: `[H, D]` each, in the dtype of x, H a multiple of 128 up to 65536.
      config: schedule.

    Returns:
      y: `[M, D]`.
      nnz: int32 `[M]`, the number of non-zeros of the gate.
      l1: float32 `[M]`, the sum of the magnitudes of the hidden activation.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any token.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_up", weights.up)
    h, d = weights.up.shape
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must be [M, D] with M from 1 to {MAX_TOKENS}, got {list(x.shape)}")
    m = x.shape[0]
    support.check_array("x", x, (m, d), weights.up.dtype)
    support.check_array("w_gate", weights.gate, (h, d), weights.up.dtype)
    support.check_array("w_down", weights.down, (h, d), weights.up.dtype)

    gate = _gate(x, weights, config)
    y, nnz, l1 = token_rows.multiply(gate, x, weights, row_loads=config.row_loads)
    return y[:, :d], nnz, l1, jnp.any(gate != 0, axis=0)


def _gate(x, weights, config):
    """`relu(x @ w_gate^T)`: `[M rounded up to a multiple of 8, H]`, 0 past M."""
    tokens = pl.cdiv(x.shape[0], 8) * 8
    if x.shape[0] > 8:  # the tiling of x in shared memory takes 8 rows, or all of fewer
        x = jnp.pad(x, ((0, tokens - x.shape[0]), (0, 0)))
    h = len(weights.activated)
    kernel = plgpu.kernel(
        functools.partial(_gate_kernel, stages=config.stages),
        out_type=jax.ShapeDtypeStruct((tokens, h), x.dtype),
        grid=(h // _TILE_NEURONS,),
        grid_names=("tile",),
        kernel_name="few_tokens_gate",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(x, weights.activated, weights.linear, weights.down)


def _gate_kernel(x, w_gate, w_up, w_down, gate, *, stages):
    tile = lax.axis_index("tile")
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    acc = multiply(x, w_gate, tile, tokens=gate.shape[0], stages=stages)
    out = gate.at[:, pl.ds(tile * _TILE_NEURONS, _TILE_NEURONS)].T
    g = jnp.maximum(acc, 0).astype(gate.dtype)
    versions.store(out, plgpu.layout_cast(g, plgpu.Layout.WGMMA_TRANSPOSED))
    prefetch_rows(jnp.max(acc, axis=1), tile, [w for w in (w_up, w_down) if w is not None])


def multiply(x_ref, w_ref, tile: jax.Array, *, tokens: int, stages: int) -> jax.Array:
    """Multiplies the gate weights of 64 neurons with all tokens.

    Args:
      x_ref: GMEM `[M, D]`, M up to 8 or a multiple of 8.
      w_ref: GMEM `[H, D]`.
      tile: int32 scalar; the neurons are those from `64 * tile` on.
      tokens: M rounded up to a multiple of 8.
      stages: stages of the ring in shared memory, at least 2.

    Returns:
      float32 `[64, tokens]` in the WGMMA layout, 0 past M.
    """
    d = x_ref.shape[1]
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    spec = functools.partial(plgpu.BlockSpec, transforms=transforms, delay_release=1)

    def accumulate(acc):
        def step(_, x_smem, w_smem):
            plgpu.wgmma(acc, w_smem, x_smem.T)
            plgpu.wgmma_wait(1)

        plgpu.emit_pipeline(
            step,
            grid=(pl.cdiv(d, _STAGE_K),),
            in_specs=[
                spec((tokens, _STAGE_K), lambda k: (versions.first_block(), k)),
                spec((_TILE_NEURONS, _STAGE_K), lambda k: (tile, k)),
            ],
            max_concurrent_steps=stages,
        )(x_ref, w_ref)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(accumulate, plgpu.ACC((_TILE_NEURONS, tokens), jnp.float32))


def prefetch_rows(top: jax.Array, tile: jax.Array, w_refs: list) -> None:
    """Prefetches the weights of neurons that fire into L2.

    Args:
      top: float32 `[64]` in the layout of a row-wise reduction of `multiply`'s result: the largest
        value of each neuron's gate before ReLU. A NaN fetches nothing.
      tile: int32 scalar; the neurons are those from `64 * tile` on.
      w_refs: one or two GMEM references `[H, D]`, 16-bit.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA.reduce(1), gather.SCALAR, [plgpu.RefType()] * len(w_refs))
    )
    def step(_, top, tile, w_refs):
        ptx, const = mgpu.utils.inline_ptx, simt.const
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        lane, warp = simt.lane_and_warp()
        row = arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))
        first = arith.addi(arith.muli(tile.registers.item(), const(_TILE_NEURONS)), row)
        # The four lanes of a quad hold the same two neurons: each fetches one of their four rows.
        for i, value in enumerate(top.registers.flat):
            (value,) = gather.elements(value, f32)
            fires = arith.cmpf(arith.CmpFPredicate.OGT, value, mgpu.c(0.0, f32))
            neuron = arith.extui(i64, arith.addi(first, const(8 * i)))
            for j, w_ref in enumerate(w_refs):
                size = 2 * ir.MemRefType(w_ref.type).shape[1]
                base = simt.gmem_address(w_ref, const(0))
                is_mine = arith.cmpi(
                    arith.CmpIPredicate.eq, arith.andi(lane, const(3)), const(2 * i + j)
                )
                ptx(
                    f"cp.async.bulk.prefetch.L2.global [$0], {size};",
                    arith.addi(base, arith.muli(neuron, mgpu.c(size, i64))),
                    predicate=arith.andi(fires, is_mine),
                )

    step(top, tile, w_refs)
