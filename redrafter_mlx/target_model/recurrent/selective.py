"""The selective state space of Mamba 1 (arXiv 2312.00752): Mamba and Jamba.

A channel with state h [S] reads a position's input x, step dt, and directions B and C [S] as

    h = e^(dt A) h + dt x B,   output C . h + D x

Each channel and entry of the state decays at a rate of its own, so that a tree form would hold
N x N of them: states are gathered from parents.
"""

from __future__ import annotations

from abc import abstractmethod

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.jamba import JambaMambaMixer
from mlx_lm.models.mamba import MambaBlock

from redrafter_mlx.target_model.recurrent.by_parent import ByParent
from redrafter_mlx.target_model.recurrent.interface import Tape, TreeNodes

_Read = tuple[mx.array, mx.array, mx.array]


class SelectiveScan(ByParent):
    """The scan over inputs [B, N, C] of a mixer; its channels C have S states each.

    Shapes:
      state: [B, C, S]
      tape:  e^(dt A) and dt x B, [B, N, C, S]
    """

    @abstractmethod
    def normed(self, mixer: nn.Module, dt: mx.array, B: mx.array, C: mx.array) -> _Read:
        """Return steps, before their projection, and directions as the mixer norms them."""

    def scan(
        self, nodes: TreeNodes, mixer: nn.Module, x: mx.array, state: mx.array | None
    ) -> tuple[mx.array, Tape]:
        """Return outputs [B, N, C] at all nodes, and the tape."""
        rank, size = mixer.time_step_rank, mixer.ssm_state_size
        parts = mx.split(mixer.x_proj(x), [rank, rank + size], axis=-1)
        dt, B, C = self.normed(mixer, *parts)
        dt = nn.softplus(mixer.dt_proj(dt))
        decay = mx.exp(dt[..., None] * -mx.exp(mixer.A_log))
        writes = decay, (dt * x)[..., None] * B[..., None, :]
        if state is None:
            state = mx.zeros((x.shape[0], *writes[1].shape[2:]), writes[1].dtype)
        states = self.states_of(nodes, state, writes)
        return (states @ C[..., None]).squeeze(-1) + mixer.D * x, writes

    def step(self, state: mx.array, writes: Tape) -> mx.array:
        decay, written = writes
        return state * decay + written


class JambaScan(SelectiveScan):
    """`JambaMambaMixer.ssm_step`, which reads all positions of a call."""

    function = staticmethod(JambaMambaMixer.ssm_step)

    def on_tree(
        self,
        nodes: TreeNodes,
        mixer: nn.Module,
        x: mx.array,
        A: mx.array,
        state: mx.array | None = None,
    ) -> tuple[tuple[mx.array, None], Tape]:
        del A
        outputs, tape = self.scan(nodes, mixer, x, state)
        return (outputs, None), tape

    def normed(self, mixer: nn.Module, dt: mx.array, B: mx.array, C: mx.array) -> _Read:
        return mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)


class MambaScan(SelectiveScan):
    """`MambaBlock._process_sequence`, whose own step reads one position.

    The convolution in it records the tape of the state before this one.
    """

    function = staticmethod(MambaBlock._process_sequence)

    def on_tree(
        self,
        nodes: TreeNodes,
        mixer: nn.Module,
        x: mx.array,
        window: mx.array | None,
        state: mx.array | None,
    ) -> tuple[tuple[mx.array, tuple[None, None]], Tape]:
        x, gate = mx.split(mixer.in_proj(x), 2, axis=-1)
        if window is None:
            window = mx.zeros((x.shape[0], mixer.conv_kernel_size - 1, x.shape[2]), x.dtype)
        x = nn.silu(mixer.conv1d(mx.concatenate([window, x], axis=1)))
        outputs, tape = self.scan(nodes, mixer, x, state)
        return (mixer.out_proj(swiglu(gate, outputs)), (None, None)), tape

    def normed(self, mixer: nn.Module, dt: mx.array, B: mx.array, C: mx.array) -> _Read:
        if not mixer.use_bcdt_rms:
            return dt, B, C
        eps = mixer.args.mixer_rms_eps
        dt, B, C = [mx.fast.rms_norm(a, weight=None, eps=eps) for a in (dt, B, C)]
        return dt, B, C
